"""Studies on hosts that a Ray cluster reserves; the hosts run the same agents as in any study on several hosts."""
