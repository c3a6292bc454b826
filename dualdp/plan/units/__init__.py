# SPDX-License-Identifier: Apache-2.0
"""Units of privacy: the rows of each user, the rows drawn of them, and which unit to choose."""
