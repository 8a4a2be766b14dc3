"""Mutants of what is behind the pool: host memory, files, and the threads that copy."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

OFFLOAD = "nanoengine/features/kv_offload/offload.py"
HOST = "nanoengine/features/kv_offload/host_tier.py"
DISK = "nanoengine/features/kv_offload/disk_tier.py"
GATE = "nanoengine/features/kv_offload/file_gate.py"
FOLDER = "nanoengine/features/kv_offload/kv_folder.py"
KV_FILE = "nanoengine/features/kv_offload/kv_file.py"
COPIER = "nanoengine/features/kv_offload/block_copier.py"
THREAD = "nanoengine/features/kv_offload/file_thread.py"
TEST_OFFLOAD = "tests/features/kv_offload/test_offload.py"
TEST_TIERS = "tests/features/kv_offload/test_tiers_every_way.py"
TEST_FILES = "tests/features/kv_offload/test_files.py"
TEST_COPIER = "tests/features/kv_offload/test_block_copier.py"

MUTANTS = (
    Mutant(
        "copy-in-flight-is-pushed-out",
        HOST,
        "if entry.is_copied and key not in self.held)",
        "if key not in self.held)",
        "An entry of host memory is pushed out to a file before its copy is made for certain.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "pinned-slot-is-pushed-out",
        HOST,
        "if entry.is_copied and key not in self.held)",
        "if entry.is_copied)",
        "The oldest slot of host memory is given away while it is to be loaded.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "hit-in-host-memory-is-not-pinned",
        OFFLOAD,
        "                self.host.held.add(key)\n",
        "                pass\n",
        "What an admission evicts pushes out of host memory what it is about to load.",
        (TEST_TIERS,),
    ),
    Mutant(
        "host-hit-does-not-renew",
        HOST,
        "        self.entries.move_to_end(key)\n",
        "        pass\n",
        "A hit in host memory does not keep its entry from being pushed out as the oldest.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "copies-of-a-failed-step-stay",
        OFFLOAD,
        "            for key, entry in [*saved,",
        "            for key, entry in [] and [*saved,",
        "A copy that a failed step was to make is loaded.",
        (TEST_OFFLOAD, TEST_TIERS),
    ),
    Mutant(
        "wrong-kv-stays-in-host-memory",
        OFFLOAD,
        "        self.in_pool.pop(key, None)\n        self.host.drop(key)\n",
        "        self.in_pool.pop(key, None)\n",
        "K/V that may be wrong is loaded from host memory.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "beginnings-are-written-first",
        OFFLOAD,
        "in sorted(found, reverse=True):",
        "in sorted(found):",
        "Where a folder is full, the beginnings of prefixes are deleted to make room for their ends.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "file-is-read-while-it-is-written",
        DISK,
        "        self.writing.add(name)\n",
        "        self.files.add(name)\n",
        "A file whose writing was not reported yet counts as readable.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "deleted-file-is-not-written-again",
        DISK,
        'if kind == "gone" or (kind == "read" and problem is not None):',
        'if kind == "read" and problem is not None:',
        "A file that was deleted to make room still counts as there.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "failed-read-counts-as-hit",
        DISK,
        "            if problem is None:\n                self.staged[name] = tokens\n",
        "            self.staged[name] = tokens\n",
        "A file that could not be read counts as K/V in memory.",
        (TEST_OFFLOAD, TEST_TIERS),
    ),
    Mutant(
        "read-for-other-tokens-is-a-hit",
        DISK,
        "return bool(self.staged) and self.staged.get(self.name(key)) == tokens",
        "return self.name(key) in self.staged",
        "A file that was read for other tokens of the same hash is loaded.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "memory-of-files-is-kept",
        DISK,
        "                self.staged.pop(name, None)\n                self.reading.pop(name, None)\n                orders",
        "                orders",
        "Files that nobody wants any more stay in memory.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "prompt-does-not-wait-for-its-files",
        GATE,
        "        if fetch.left:\n            return 0\n",
        "        if fetch.left:\n            return budget\n",
        "A prompt is computed while its K/V is being read from files.",
        (TEST_OFFLOAD,),
    ),
    Mutant(
        "folder-outgrows-its-bytes",
        FOLDER,
        "while self._sizes and self._num_bytes + size > self.max_bytes:",
        "while self._sizes and self._num_bytes > self.max_bytes:",
        "A file is written though the folder is full but for less than its size.",
        (TEST_FILES,),
    ),
    Mutant(
        "files-of-old-are-in-no-order",
        FOLDER,
        "found.append((facts.st_mtime_ns,",
        "found.append((-facts.st_mtime_ns,",
        "After a restart, the newest files are deleted first.",
        (TEST_FILES,),
    ),
    Mutant(
        "file-that-was-read-is-deleted-first",
        FOLDER,
        "            self._sizes.move_to_end(name)\n",
        "            pass\n",
        "A file that was just read is deleted as the one that was not used for longest.",
        (TEST_FILES,),
    ),
    Mutant(
        "file-of-another-model-is-read",
        KV_FILE,
        "    if found != start:\n",
        "    if False:\n",
        "A file of other tokens or another model is taken for what was asked for.",
        (TEST_FILES,),
    ),
    Mutant(
        "checksum-is-not-compared",
        KV_FILE,
        "if _CHECKSUM.pack(checksum.intdigest()) != end:",
        "if False:",
        "A file whose K/V was altered is read.",
        (TEST_FILES,),
    ),
    Mutant(
        "links-are-followed",
        KV_FILE,
        "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "os.O_RDONLY | os.O_NONBLOCK",
        "A link in place of a file of K/V is read.",
        (TEST_FILES,),
    ),
    Mutant(
        "copies-overtake-each-other",
        COPIER,
        "number = max(last.get(copy.source, -1), last.get(copy.target, -1)) + 1",
        "number = last.get(copy.target, -1) + 1",
        "A copy reads a block before an earlier copy of the same plan has written it.",
        (TEST_COPIER,),
    ),
    Mutant(
        "file-is-read-twice-at-once",
        THREAD,
        'if ("read", name) in self._asked:',
        "if False:",
        "A file that is being read is read once more, and answered twice.",
        (TEST_FILES,),
    ),
    Mutant(
        "failed-read-is-reported-as-done",
        THREAD,
        "FileAnswer(job.kind, job.name, problem), content",
        "FileAnswer(job.kind, job.name), content",
        "A file that could not be read is reported as if it had been.",
        (TEST_FILES,),
    ),
    Mutant(
        "what-waits-to-be-written-is-unbounded",
        THREAD,
        "return not self._num_unwritten or self._num_unwritten + size <= MAX_UNWRITTEN",
        "return True",
        "Copies of blocks that wait for a slow disk fill the memory.",
        (TEST_COPIER,),
    ),
)
