# SPDX-License-Identifier: Apache-2.0
"""`PrivacyEngine`, the private step, and the loader of planned batches."""
