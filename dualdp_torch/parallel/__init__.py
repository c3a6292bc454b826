# SPDX-License-Identifier: Apache-2.0
"""Process group and collectives, comparisons between processes, and models sharded by FSDP."""
