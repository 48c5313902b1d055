"""Attention over weighted entries: one softmax, `logit_i = q.k_i * scale + log_weight_i`."""

from kvest.attend.dense import attention
from kvest.attend.stored import attend

__all__ = ["attend", "attention"]
