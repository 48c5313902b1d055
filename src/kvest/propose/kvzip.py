"""KVzip: what the model looks at while it repeats the document."""

from __future__ import annotations

from dataclasses import dataclass

from kvest.propose._base import Propose, at_least, propose_score
from kvest.types import Observation, Proposal


@dataclass(frozen=True)
class KVzip(Propose):
    """score_i = max_{g, j} p_j(i),  j: the tokens with which the model is asked for, and repeats, the chunk of i

    The document is repeated `chunk` tokens a pass, teacher-forced, over the whole cache; p_j(i) is a softmax over the
    chunk's entries, those that stand before the repeated text (the chat template's beginning, or the sinks), and the
    repetition up to j. `cache.prepare` runs the passes; what it does not repeat has score 1, the largest there is.

    Source: KVzip, arXiv:2505.23416, and its authors' code, which repeats 2,000 tokens a pass.
    Unlike the paper: without a chat template, later chunks see the policy's sinks, and not only themselves; what stands
    before the text is ranked first and not kept whatever the budget. kvpress 0.5.5 ranks all of it but 4 tokens last.
    Its variant that multiplies by norm(W_O v_i) / norm(h_j) is not offered: attention does not see h.
    """

    chunk: int = 2048

    def __post_init__(self) -> None:
        at_least(1, chunk=self.chunk)

    @property
    def extra_passes(self) -> int:  # type: ignore[override]  # a knob of this one
        return self.chunk

    def __call__(self, observation: Observation) -> Proposal:
        if observation.prepared is None:
            raise ValueError(
                "kvzip scores entries while the model repeats the document, and this observation has no such scores: "
                "read the document with cache.prepare(input_ids), or pass Observation.prepared"
            )
        return propose_score(observation, observation.prepared)
