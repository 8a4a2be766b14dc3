"""Capabilities and families of models from modules outside of the package."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoengine import LLM, SamplingParams
from nanoengine.builder import read_config
from nanoengine.errors import InvalidConfig, InvalidPrompt, UnknownOption, UnsupportedModel
from nanoengine.serve.arguments import Parser
from nanoengine.serve.command import add_arguments, configs, named_plugins

CAPABILITY = """
from dataclasses import dataclass
from nanoengine.core.capability import Capability
from nanoengine.core.seams import PolicyPart
from nanoengine.errors import InvalidPrompt

@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    '''Of the plugin.

    Args:
        most_wanted: tokens.
    '''

    most_wanted: int = 4

class Part(PolicyPart):
    def __init__(self, most):
        self.most = most

    def made(self, request):
        if len(request.prompt_token_ids) > self.most:
            raise InvalidPrompt("too long")

class CAPABILITY(Capability):
    options = Options

    def runner(self, startup):
        from nanoengine.core.sampler import LogitsProcessor
        startup.runner.sampler.processors.append(type("Ours", (LogitsProcessor,), {"pieces": {}})())

    def policy(self, startup):
        assert not startup.parts, "it comes before those of the package"
        names = [type(own).__name__ for own in startup.runner.sampler.processors]
        assert names[:2] == ["SampleLogprobs", "Ours"], "log probabilities are the model's own"
        startup.parts.append(Part(startup.config.of(Options).most_wanted))
"""

FAMILY = """
from nanoengine.models.families import qwen
ARCHITECTURES = ("OursForCausalLM",)

def read_config(fields, architecture):
    return qwen.read_config(fields, "Qwen3ForCausalLM")
"""

BROKEN = {
    "empty": ("", "whose CAPABILITY is None: it must be a subclass"),
    "an_object": ("CAPABILITY = 3", "whose CAPABILITY is 3: it must be a subclass"),
    "half": ("ARCHITECTURES = ('A',)", "whose CAPABILITY is None: it must be a subclass"),
    "raises": ("1 / 0", "cannot be imported .*: ZeroDivisionError: division by zero"),
    "old": (CAPABILITY.replace("most_wanted", "max_num_seqs"), "the field 'max_num_seqs' must have another name"),
    "bare": (CAPABILITY.replace("int = 4", "int"), "the field 'most_wanted' must have a default"),
    "exits": ("raise SystemExit(0)", "cannot be imported .*: SystemExit: 0"),
    "unresolved": (CAPABILITY.replace("int = 4", "'Missing' = 4"), "options cannot be read: NameError: .*Missing"),
    "ends": (CAPABILITY.replace("int = 4", "'exit(0)' = 4"), "options cannot be read: SystemExit: 0"),
    "late": (CAPABILITY.replace("= 4\n", "= 4\n    __post_init__ = lambda self: exit(0)\n"), "SystemExit: 0"),
    "plain": (
        CAPABILITY.replace("options = Options", "options = int"),
        "options is .*int.*: it must be a frozen dataclass",
    ),
}


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules, which Python finds; they are forgotten when the test is over."""
    monkeypatch.syspath_prepend(tmp_path)
    sources = {"a_limit": CAPABILITY, "a_family": FAMILY} | {name: source for name, (source, _) in BROKEN.items()}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setitem(sys.modules, name, None)  # so that it is taken out in the end
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_a_capability_and_a_family_do_what_ours_do(tiny: Path, outside: Path) -> None:
    folder = Path(shutil.copytree(tiny, outside / "model"))
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | {"architectures": ["OursForCausalLM"]}))
    options = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 50, "use_tqdm": False}
    params = SamplingParams(temperature=0, max_tokens=5)
    with pytest.raises(UnsupportedModel, match="OursForCausalLM"):
        LLM(str(folder), **options)
    assert "a_limit" not in sys.modules, "nothing is loaded that was not named"
    with LLM(str(tiny), **options) as llm:
        expected = llm.generate([5, 6, 7], params)[0].outputs[0].token_ids
    with LLM(str(folder), plugins=["a_limit", "a_family"], most_wanted=3, **options) as llm:
        assert llm.generate([5, 6, 7], params)[0].outputs[0].token_ids == expected
        with pytest.raises(InvalidPrompt, match="too long"):
            llm.generate([5, 6, 7, 8], params)
        assert "a_limit.CAPABILITY" in llm.built.capabilities


@pytest.mark.usefixtures("outside")
def test_a_process_without_the_folder_on_its_path_finds_them() -> None:
    """As processes of workers and replicas are started; and only where plugins were named."""
    config = read_config("demo", {"plugins": ["a_limit"], "most_wanted": 9})
    assert pickle.loads(pickle.dumps(config)) == config
    code = (
        "import pickle, sys; before = list(sys.path)\n"
        "pickle.load(sys.stdin.buffer); assert sys.path == before\n"
        "config = pickle.load(sys.stdin.buffer)\n"
        "assert [own.most_wanted for own in config.options.values() if hasattr(own, 'most_wanted')] == [9]\n"
        "assert sys.path[: len(before)] == before"
    )
    sent = pickle.dumps(read_config("demo", {})) + pickle.dumps(config)
    subprocess.run([sys.executable, "-P", "-c", code], input=sent, check=True, cwd=Path(__file__).parent.parent)


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_plugin_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"({name}.*)?{BROKEN[name][1]}"):
        read_config("demo", {"plugins": [name]})


def test_modules_that_are_not_there_and_options_without_their_plugin() -> None:
    with pytest.raises(InvalidConfig, match=r"'no_such\.thing', which cannot be imported \(.*PYTHONPATH\)"):
        read_config("demo", {"plugins": ["no_such.thing"]})
    with pytest.raises(InvalidConfig, match="plugins is 'a_limit': it must be a list"):
        read_config("demo", {"plugins": "a_limit"})
    with pytest.raises(UnknownOption, match="most_wanted"):
        read_config("demo", {"most_wanted": 3})


@pytest.mark.parametrize("by_file", [False, True])
def test_the_command_line_has_their_options(outside: Path, by_file: bool) -> None:
    (outside / "own.toml").write_text('plugins = ["a_limit"]\nmost-wanted = 7')
    line = [
        "demo",
        *(["--config", str(outside / "own.toml")] if by_file else ["--plugins", "a_limit", "--most-wanted", "7"]),
    ]
    parser = Parser(prog="serve")
    add_arguments(parser, named_plugins(line))
    options, _ = configs(parser.read(line))
    assert options == {"plugins": ["a_limit"], "most_wanted": 7}
    assert "tokens." in parser.format_help()
    changes = {"old": ("most_wanted", "port", "--port"), "a_family": ("int = 4", "'list[[int]]' = 4", "list")}
    for name, (text, other, said) in changes.items():
        (outside / f"{name}.py").write_text(CAPABILITY.replace(text, other))
        with pytest.raises(InvalidConfig, match=rf"[oO]ptions.*{said}"):
            add_arguments(Parser(prog="serve"), named_plugins(["demo", "--plugins", name]))
