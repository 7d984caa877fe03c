# SPDX-License-Identifier: Apache-2.0
"""The series: our patches, and the tool that lays them over a vLLM tree.

Note [The series tool]
A *target* is a vLLM tree on disk, installed or checked out. A *patch* is a list of
*steps*; running them over the target's original files gives the result files, all in
memory (`steps`, `edits`). The result, the RECORD lines and our own bookkeeping then
become one *change*, a mapping of path to new content, that `transaction` carries out
with an undo log: whatever interrupts it, the next run finds either the state before
or the state after, or puts the state before back. `operations` says what the commands
do, `cli` how they are typed. Everything that a later run needs lies in one folder
inside the target (`target.FOLDER`), so a target can be copied, shipped in an image and
reverted there without the machine that applied the series.
"""


class SeriesError(Exception):
    """A failure we expect; its text is one sentence for the user."""
