"""`nanoengine chat` on a parrot, for a process of its own: python -m tests.serve.chat.talk FOLDER [arguments]."""

import sys
from pathlib import Path

import nanoengine.llm
from nanoengine.serve.cli import main
from tests.serve.chat import toys

folder, *arguments = sys.argv[1:]
nanoengine.llm.build_engine = lambda *_: toys.build(Path(folder))
sys.exit(main(["chat", "parrot", *arguments]))
