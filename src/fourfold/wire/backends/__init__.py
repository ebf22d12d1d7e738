"""What connects ranks: threads of one process, gloo, NCCL. One file each, behind `channel.Channel`."""
