"""Any value, in any place of any request: the answer is never a 5xx, a refusal repeats little of it, and the engine goes on."""

from __future__ import annotations

import json
import os
import random
import re

import pytest

from tests.serve.server.bodies import DOORS, positions
from tests.serve.server.running import Server

NUM_DRAWN = int(os.environ.get("NANOENGINE_NUM_BODIES", "60"))
"""Bodies for a path; a search takes more of them."""

HOLE = "the place of the value"
LONG = b"y" * 3000
NO_LIMIT = re.compile(rb'"(max_tokens|max_output_tokens|num_predict|n_predict)": (null|18446744073709551616)')
"""With it an answer is as long as the model can make it."""

VALUES = [
    *(b"null", b"true", b"-1", b"0", b"1.5", b"1e999", b"NaN", b"18446744073709551616", b"1" * 5000, b'""', b'"x"'),
    *(b'"\\ud800"', b'"\\u0000"', b'"\xff"', b"[]", b"[null]", b"[[]]", b"[1,2]", b'["x"]', b"{}", b'{"a":1}'),
    *(b'{"type":[],"role":{}}', b'[{"role":1,"content":2}]', b'[{"type":"function","function":1}]'),
    *(
        b"[" * 900 + b"]" * 900,
        b'"%b"' % LONG,
        b'{"%b":1}' % LONG,
        b'["%b"]' % LONG,
        b'{"type":"%b","role":"%b"}' % (LONG, LONG),
    ),
]


@pytest.mark.parametrize("path", DOORS)
def test_any_value_in_a_body_is_answered(demo: Server, path: str) -> None:
    shapes = [json.dumps(replaced(HOLE)).encode() for _, _, replaced in positions(*DOORS[path])]
    bodies = [own.replace(json.dumps(HOLE).encode(), value) for own in shapes for value in VALUES]
    base, path = json.dumps(DOORS[path][1]).encode(), path.partition("#")[0]
    wrong, statuses = [], []
    drawn = random.Random(path).sample(bodies, min(NUM_DRAWN, len(bodies)))
    for body in [base, *(own for own in drawn if not NO_LIMIT.search(own))]:
        answer = demo.post(path, body)
        statuses.append(answer.status)
        repeats = answer.status >= 400 and any(sign * 100 in answer.body for sign in (b"y", b"1"))
        if answer.status >= 500 or b"an error of its own" in answer.body or repeats:
            wrong.append(f"{body[:400]!r}: {answer.status} {answer.body[:80]!r}")
    assert wrong == []
    assert statuses[0] == 200, "the request without any other value"
    assert demo.complete("a", max_tokens=1).status == 200
    demo.check_idle()
