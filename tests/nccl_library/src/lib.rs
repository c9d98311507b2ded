//! NCCL in memory.
