"""Sharded training over several processes (FSDP2): process group, load balancing, sharded trainer."""
