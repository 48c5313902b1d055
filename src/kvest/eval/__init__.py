"""Measuring what an eviction costs: one prefill, many policies, the full cache as the yardstick."""
