# SPDX-License-Identifier: Apache-2.0
"""Programs that run on several devices or processes; the tests start them and read what they say.

Starting is what takes time, so a program makes many checks: each is a function, and the program
says of each whether it held. A check that failed comes with its traceback.
"""
