# SPDX-License-Identifier: Apache-2.0
"""Whether the series can do its work on this machine, and if not, what helps.

Note [The doctor]
A *check* asks one question of a *machine* and answers with a *finding*. It reads
files, environment variables and what three children found out: one loads the GPU's
runtime, one has vLLM read the arguments of `vllm serve`, one imports vLLM. A driver
may hang or crash, and an import may end its process, so each runs in a process of its
own. They start side by side before the first check, none outlives the doctor, and no
answer in time is an answer. A check that raises is a finding as well, and the run goes
on.
"""
