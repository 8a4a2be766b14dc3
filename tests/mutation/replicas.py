"""Mutants of replicas."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

FLEET = "nanoengine/scale/replicas/fleet.py"
ROUTER = "nanoengine/scale/replicas/router.py"
REPLICA = "nanoengine/scale/replicas/replica.py"
CHILD = "nanoengine/scale/worker/child.py"
SLOTS = "nanoengine/scale/replicas/slots.py"
SUPERVISOR = "nanoengine/scale/replicas/supervisor.py"
OF_FLEET = "tests/scale/replicas/test_fleet.py"
OF_ROUTER = "tests/scale/replicas/test_router.py"
OF_PROCESSES = "tests/scale/replicas/test_processes.py"
OF_PEERS = "tests/scale/replicas/test_peers.py"
OF_ADAPTERS = "tests/features/lora/test_replicas.py"

MUTANTS = (
    Mutant(
        "a-gap-in-a-stream-is-overlooked",
        FLEET,
        "        if delta.first_token != have:",
        "        if delta.first_token < have:",
        "Tokens that were lost on the way are missing in the stream.",
        (OF_FLEET,),
    ),
    Mutant(
        "a-completion-that-moves-begins-anew",
        FLEET,
        "        {seq.index: seq.output_token_ids for seq in open_seqs},\n",
        "        {seq.index: [] for seq in open_seqs},\n",
        "A request that moves computes all its tokens again.",
        (OF_FLEET,),
    ),
    Mutant(
        "completions-that-ended-are-computed-again",
        FLEET,
        "    open_seqs = [seq for seq in request.sequences if not seq.finished]\n    age",
        "    open_seqs = request.sequences\n    age",
        "A request that moves computes completions that had ended.",
        (OF_FLEET,),
    ),
    Mutant(
        "a-gap-in-the-news-of-a-cache-is-overlooked",
        FLEET,
        "news.first_change != member.next_change and member.is_known",
        "news.first_change < member.next_change and member.is_known",
        "The router believes in blocks that are gone.",
        (OF_FLEET,),
    ),
    Mutant(
        "nothing-is-reserved",
        ROUTER,
        "        self._reserve(best, route.num_prompt + num_new)\n",
        "        self._reserve(best, 0)\n",
        "A burst of requests with one prefix goes to one replica.",
        (OF_ROUTER,),
    ),
    Mutant(
        "a-cleared-replica-is-still-believed-to-have-blocks",
        ROUTER,
        "        self._replicas[replica].cached.clear()\n",
        "        return\n",
        "A replica that has forgotten its cache is chosen for what it had.",
        (OF_ROUTER,),
    ),
    Mutant(
        "the-text-of-a-moved-completion-comes-twice",
        REPLICA,
        "Held(message.key, request, num_tokens, dict(own.num_chars), wants)",
        "Held(message.key, request, num_tokens, {}, wants)",
        "The first text after a move repeats all text before it.",
        (OF_FLEET,),
    ),
    Mutant(
        "a-replica-that-is-stopped-is-waited-for",
        SUPERVISOR,
        "now - process.asked > limit:",
        "now - process.asked > 1000 * limit:",
        "The requests of a process that is stopped hang.",
        (OF_PROCESSES,),
    ),
    Mutant(
        "a-replica-outlives-the-front",
        CHILD,
        "    except (EOFError, OSError):\n        os._exit(0)",
        "    except (EOFError, OSError):\n        threading.Event().wait()",
        "A replica whose front was killed stays.",
        (OF_PROCESSES,),
    ),
    Mutant(
        "a-request-comes-before-its-adapter",
        FLEET,
        "            self._equip(own.member)\n            submit",
        "            submit",
        "A request whose adapter was just loaded, or was unloaded meanwhile, finds a replica without it.",
        (OF_ADAPTERS,),
    ),
    Mutant(
        "unloaded-adapters-stay-in-replicas",
        FLEET,
        "drops = member.adapters - kept.keys()",
        "drops = frozenset[str]()",
        "Replicas have more adapters than the limit, and than their kernels have room for.",
        (OF_ADAPTERS,),
    ),
    Mutant(
        "a-request-moves-without-its-adapter",
        FLEET,
        "            submit = submit._replace(adapter=digest)\n",
        "            submit = submit._replace(adapter=digest if own.key == 1 else None)\n",
        "Who goes on with a request computes it without its adapter.",
        (OF_ADAPTERS,),
    ),
    Mutant(
        "memory-of-dropped-adapters-stays-taken",
        REPLICA,
        "            if message.drops and not self.engine.has_unfinished:\n",
        "            if False:\n",
        "A replica without requests gives back nothing of adapters that were unloaded.",
        (OF_ADAPTERS,),
    ),
    Mutant(
        "starts-are-tried-without-end",
        SUPERVISOR,
        "            if slot.is_given_up(self.options):\n",
        "            if False:\n",
        "A replica that never has room is started again and again.",
        (OF_PROCESSES,),
    ),
    Mutant(
        "requests-wait-for-replicas-that-were-given-up",
        SLOTS,
        "    if all(slot.is_given_up(options) for slot in slots):\n",
        "    if False:\n",
        "A request that comes when no replica is started any more waits without end.",
        (OF_PROCESSES,),
    ),
    Mutant(
        "a-replica-that-never-starts-is-waited-for",
        SUPERVISOR,
        "elif now - process.heard > ",
        "elif now - process.heard > 1000 * ",
        "A replica that hangs while it starts hangs the front, or its restart.",
        (OF_PEERS,),
    ),
    Mutant(
        "what-means-nothing-ends-the-front",
        SUPERVISOR,
        "        except Exception as error:  # a message without a meaning here: perhaps the replica is of another version\n",
        "        except KeyError as error:\n",
        "One replica of another version ends all.",
        (OF_PEERS,),
    ),
    Mutant(
        "requests-wait-for-a-node-without-end",
        SLOTS,
        "    if seconds_without > options.replica_wait_seconds:\n",
        "    if False:\n",
        "Where the only node is gone, requests hang, and health says that all is well.",
        (OF_PEERS,),
    ),
    Mutant(
        "a-failed-start-counts-as-a-replica-that-computed-nothing",
        SUPERVISOR,
        "        slot.is_starting, self.failure = False, error\n        slot.num_failed += 1\n",
        "        slot.is_starting, self.failure = False, error\n        slot.num_failed += 1\n        slot.num_useless += 1\n",
        "Requests that come behind a restart end, as if no replica could compute anything.",
        (OF_PROCESSES,),
    ),
)
