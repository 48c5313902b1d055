"""Policies by name: the systems of papers, and kvest's own. `NAME@BUDGET` is a policy."""

NAMED = {
    "kvest": "with_certain(h2o(values=True), by=keydiff, share=0.4)+one_threshold/systematic/tempered(0.85)",
    "continuation": "h2o(values=True)+one_threshold/systematic/tempered(0.85)",
    "probabilistic": "harmonic+one_threshold/with_replacement/tempered(0.85, of=counts)",
    "capkv": "capkv/top_k/none",
    "certified": "snapkv/poisson/inclusion",
    "snapkv": "snapkv/top_k/none",
    "h2o": "h2o/top_k/none",
    "adakv": "snapkv+adaptive/top_k/none",
    "pyramidkv": "snapkv+pyramid/top_k/none",
    "chunkkv": "chunked(snapkv)/top_k/none",
    "criticalkv": "critical(snapkv)/top_k/none",
    "defensivekv": "defensive(snapkv)+adaptive/top_k/none",
    "lava": "lava+lava/top_k/none",
    "momentkv": "chunked(moment_residual, 4)+adaptive/top_k/none+moments",
    "calidrop": "snapkv/top_k/none+recall",
    "lagkv": "lagkv/top_k/none",
    "curdkv": "curdkv/top_k/none",
    "compactor": "compactor/top_k/none",
    "expected_attention": "expected_attention/top_k/none",
    "tova": "last_query(values=False, layer=True)/top_k/none",
    "keydiff": "keydiff/top_k/none",
    "knorm": "key_norm/top_k/none",
    "kvzip": "kvzip+one_threshold(raw=True)/top_k/none",
    "streaming": "streaming/top_k/none",
    "random": "uniform/systematic/inclusion",
}
"""Name -> PROPOSE[+ALLOCATE]/DESIGN/CORRECTION[+STAND_IN]."""

DEMO = (
    NAMED["snapkv"],
    "mixed(snapkv, 0.2)/systematic/inclusion",
    "h2o(values=True)/top_k/none",
    NAMED["continuation"],
    "h2o(values=True)+one_threshold(importance=damage)/systematic/tempered(0.85)",
    NAMED["keydiff"],
    NAMED["capkv"],
    "capkv/systematic/inclusion",
    NAMED["kvest"],
)
"""What `kvest compare` shows unless it is told otherwise."""
DEMO_KEEP = (0.5, 0.25)
