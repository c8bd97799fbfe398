"""Studies whose hosts a Ray cluster reserves: the hosts' agents are those of any study on several hosts."""
