# SPDX-License-Identifier: Apache-2.0
"""Planning past one machine: identities, limits, a ring by hand, and the page with the table."""

import doctest
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dualdp_tools import scaling
from dualdp_tools.cli import app
from dualdp_tools.cli.scale import COLUMNS, MEANINGS
from dualdp_tools.scaling import timing, traffic
from dualdp_tools.scaling.timing import work

PAGE = Path(__file__).parents[3] / "docs" / "scale.md"
SMALL = scaling.Transformer(2, 64, positions=32, vocabulary=100)
PRIVATE = [method for method in scaling.METHODS if method != "plain"]


def call(*arguments):
    return CliRunner().invoke(app, ["scale", *arguments])


def sent(method, num_parameters, **sizes):
    """Bytes by what is sent, without the words."""
    found = scaling.messages(method, num_parameters, **sizes)
    return {message.what: message.sent() for message in found if message.what != "agreement"}


# ---------------------------------------------------------------------- bytes


def ring_all_reduce(vectors):
    """Sums on every rank, by sending parts to the next one; and the numbers that each sent."""
    k, part = len(vectors), len(vectors[0]) // len(vectors)
    own = [[list(v[i * part : (i + 1) * part]) for i in range(k)] for v in vectors]
    count = [0] * k
    for phase in range(2):
        for turn in range(k - 1):
            packets = [(rank, (rank - turn + phase) % k) for rank in range(k)]
            moved = [(rank, i, list(own[rank][i])) for rank, i in packets]
            for rank, i, numbers in moved:
                count[rank] += part
                after = own[(rank + 1) % k]
                mine = after[i] if phase == 0 else [0] * part
                after[i] = [a + b for a, b in zip(mine, numbers, strict=True)]
    return [[x for piece in rank for x in piece] for rank in own], count


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_an_all_reduce_sends_what_a_ring_by_hand_does(ranks):
    size = 5 * ranks
    vectors = [[rank * 100 + i for i in range(size)] for rank in range(ranks)]
    sums, count = ring_all_reduce(vectors)
    assert all(total == [sum(column) for column in zip(*vectors, strict=True)] for total in sums)
    expected = scaling.Message("", "all_reduce", size, ranks).sent()
    assert count == pytest.approx([expected] * ranks)
    halves = (scaling.Message("", c, size, ranks).sent() for c in ("reduce_scatter", "all_gather"))
    assert sum(halves) == pytest.approx(expected)


@pytest.mark.parametrize("method", scaling.METHODS)
def test_one_rank_sends_nothing(method):
    assert scaling.messages(method, 1000, ranks=1) == []


@pytest.mark.parametrize("method", PRIVATE)
def test_copies_send_one_sum_whatever_the_method_and_the_physical_batches(method):
    plain = sent("plain", 1000, ranks=8)
    assert sent(method, 1000, ranks=8, chunks=5) == plain == {"sums over copies": 7000.0}


def test_two_passes_gather_twice_and_reduce_once():
    once = sent("book_keeping", 1000, ranks=4, shards=4, chunks=3)
    twice = sent("two_pass", 1000, ranks=4, shards=4, chunks=3)
    assert twice == {w: b * (2 if w.startswith("weights") else 1) for w, b in once.items()}
    assert once["weights, forward"] == 3 * 3 / 4 * 4000


def test_the_root_is_gathered_once_and_bfloat16_halves_what_is_gathered():
    sizes = {"ranks": 4, "shards": 4}
    all_again = sent("book_keeping", 1000, **sizes)
    found = sent("book_keeping", 1000, **sizes, root=400, compute_bytes=2)
    assert found["weights, forward"] == all_again["weights, forward"] / 2
    assert found["weights, backward"] == pytest.approx(all_again["weights, backward"] / 2 * 0.6)
    assert found["sums over shards"] == all_again["sums over shards"]


def test_jax_gathers_all_weights_once_in_a_physical_batch():
    found = sent("two_pass", 1000, ranks=4, shards=4, chunks=2, stack="jax")
    assert found == {"weights, forward": 6000.0, "sums over shards": 6000.0}
    assert "weights, backward" in sent("plain", 1000, ranks=4, shards=4, stack="jax")


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shards_and_copies_meet_in_one_formula(shards):
    """Sums cross every pair of levels once: the total of both reductions is that of one ring."""
    found = sent("book_keeping", 1000, ranks=8, shards=shards)
    gathered = found.get("weights, forward", 0)
    reduced = found.get("sums over shards", 0) + found.get("sums over copies", 0)
    copies = 8 // shards
    by_hand = 4000 * ((shards - 1) / shards + 2 * (copies - 1) / copies / shards)
    assert reduced == pytest.approx(by_hand)
    assert gathered == pytest.approx(4000 * (shards - 1) / shards)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": "magic"}, "method='magic' is unknown"),
        ({"shards": 3}, "shards=3 does not divide ranks=4"),
        ({"stack": "numpy"}, "stack='numpy' is unknown"),
        ({"ranks": 0}, "ranks=0 is out of range"),
    ],
)
def test_wrong_questions_about_messages(changes, text):
    arguments = {"method": "plain", "num_parameters": 10, "ranks": 4, **changes}
    with pytest.raises(ValueError, match=text):
        scaling.messages(**arguments)


# ---------------------------------------------------------------------- models, memory, time


@pytest.mark.parametrize("billions", scaling.MODELS)
def test_models_have_the_size_they_are_called_by(billions):
    model = scaling.MODELS[billions]
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.06)
    products = sum(count * i * o for count, _, i, o in model.products)
    tables = (model.vocabulary + model.positions) * model.width
    assert products + tables == model.num_parameters
    assert model.largest == max(i * o for _, _, i, o in model.products)


def test_a_plain_step_costs_six_operations_per_weight_and_position():
    model = scaling.MODELS[6.7]
    amount = work("plain", replace(model, positions=64), move=100.0)
    total = amount.forward + amount.highway + amount.weights
    weights = sum(count * i * o for count, _, i, o in model.products)
    assert total == pytest.approx(6 * weights * 64, rel=0.01)
    assert amount.norms == 0


def test_norms_cost_the_cheaper_of_both_forms():
    short, long = (replace(SMALL, positions=t) for t in (2, 4096))
    # Two positions: the Gram form. Very many: forming the gradient, which is the product again.
    assert work("book_keeping", short, move=0.0).norms == pytest.approx(
        sum(2 * count * t * t * (i + o) for count, t, i, o in short.products)
    )
    assert work("book_keeping", long, move=0.0).norms == work("plain", long, move=0.0).weights


def held(method, **sizes):
    return sum(scaling.memory(method, SMALL, **{"physical_batch_size": 4, **sizes}).values())


@pytest.mark.parametrize("method", scaling.METHODS)
def test_memory_grows_with_the_physical_batch_and_falls_with_shards(method):
    assert held(method) < held(method, physical_batch_size=8)
    big = scaling.MODELS[1.3]
    sizes = [
        sum(scaling.memory(method, big, physical_batch_size=1, shards=g).values())
        for g in (1, 8, 64)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_memory_of_the_methods_is_in_the_order_of_what_they_keep():
    model = scaling.MODELS[1.3]
    sizes = {"physical_batch_size": 8, "shards": 8, "compute_bytes": 2}
    found = {m: sum(scaling.memory(m, model, **sizes).values()) for m in scaling.METHODS}
    assert sorted(found, key=found.get) == list(
        ("plain", "per_layer", "book_keeping", "two_pass", "materialize")
    )
    assert "sums so far" in scaling.memory("plain", SMALL, physical_batch_size=1, chunks=2)


def test_jax_holds_all_gathered_weights():
    model = scaling.MODELS[6.7]
    sizes = {"physical_batch_size": 1, "shards": 64, "compute_bytes": 2}
    whole = scaling.memory("book_keeping", model, **sizes, stack="jax")["weights in use"]
    layers = scaling.memory("book_keeping", model, **sizes)["weights in use"]
    assert whole == 2 * model.num_parameters > 4 * layers


def job(**changes):
    usual = {"model": scaling.MODELS[6.7], "ranks": 64, "hardware": scaling.HARDWARE["h100"]}
    return scaling.Job(**{**usual, **changes})


@pytest.mark.parametrize("method", PRIVATE)
def test_privacy_is_never_faster_and_a_better_network_never_slower(method):
    for ranks in (8, 512):
        asked = job(ranks=ranks, sharding="full")
        plain, private = (scaling.forecast(m, asked) for m in ("plain", method))
        assert private.time.total > plain.time.total
        better = replace(asked.hardware, network=10 * asked.hardware.network)
        quick = scaling.forecast(method, replace(asked, hardware=better))
        assert quick.time.total <= private.time.total
        assert quick.time.compute == private.time.compute


def test_auto_is_the_fastest_way_that_fits():
    for billions in (0.1, 2.7, 30):
        for ranks in (8, 512, 4096):
            ways = [
                job(model=scaling.MODELS[billions], ranks=ranks, sharding=s)
                for s in ("auto", "data", "full")
            ]
            for method in ("plain", "book_keeping"):
                auto, *others = (scaling.forecast(method, way) for way in ways)
                times = [found.time.total for found in others if found]
                assert (auto.time.total if auto else None) == min(times, default=None)


def test_what_hides_and_what_does_not():
    """The sums over copies hide behind others that are formed; those of two passes do not."""
    none, all_of_it = (job(assumed=scaling.Assumptions(overlap=part)) for part in (0.0, 1.0))
    visible = scaling.forecast("book_keeping", none).time
    hidden = scaling.forecast("book_keeping", all_of_it).time
    assert hidden.exposed < visible.exposed
    copies = job(model=SMALL, sharding="data", assumed=scaling.Assumptions(overlap=1.0))
    times = {m: scaling.forecast(m, copies).time.exposed for m in scaling.METHODS}
    found = scaling.messages("two_pass", SMALL.num_parameters, ranks=64)
    sending = (timing.seconds_of(m, copies.hardware, copies.assumed) * m.times for m in found)
    assert times["two_pass"] == pytest.approx(sum(sending))
    assert times["plain"] < times["book_keeping"] < times["two_pass"]


def test_secure_noise_takes_the_time_of_the_cipher():
    fast, secure = (scaling.forecast("book_keeping", job(noise=n)).time for n in ("fast", "secure"))
    rate = scaling.Assumptions().secure_rate * scaling.Assumptions().cores
    assert secure.noise == pytest.approx(scaling.MODELS[6.7].num_parameters / 64 / rate)
    assert secure.noise > fast.noise
    assert secure.compute == fast.compute


def test_a_forecast_fits_and_is_the_largest_power_of_two_that_does():
    found = scaling.forecast("book_keeping", job())
    limit = 80e9 * 0.9
    assert sum(found.memory.values()) <= limit
    larger = 2 * found.physical_batch_size
    again = scaling.memory(
        "book_keeping",
        scaling.MODELS[6.7],
        physical_batch_size=larger,
        shards=found.shards,
        chunks=found.chunks // 2,
        compute_bytes=2,
    )
    assert sum(again.values()) > limit
    assert found.chunks * found.physical_batch_size >= 8192 / 64


def test_what_does_not_fit_has_no_forecast():
    assert scaling.forecast("plain", job(model=scaling.MODELS[70], ranks=8)) is None


def test_shards_of_a_node_are_for_jax():
    assert scaling.forecast("book_keeping", job(stack="jax", sharding="node")).shards == 8
    with pytest.raises(ValueError, match="sharding='node' is not there under torch"):
        job(sharding="node")


@pytest.mark.parametrize(
    "changes",
    [{"sharding": "half"}, {"precision": "int4"}, {"noise": "loud"}, {"stack": "numpy"}],
    ids=str,
)
def test_wrong_words_are_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"{name}='.*' is unknown. Expected one of"):
        job(**changes)


def test_examples_in_the_docstrings():
    assert doctest.testmod(traffic).failed == 0


# ---------------------------------------------------------------------- command and page


def test_the_table_has_a_row_for_every_question():
    done = call("--parameters", "0.1,70", "--accelerators", "8,64", "--method", "two_pass")
    assert done.exit_code == 0, done.output
    assert len([line for line in done.output.splitlines() if "two_pass" in line]) == 4
    assert "too big" in done.output


def test_json_holds_every_number():
    arguments = ["--parameters", "6.7", "--accelerators", "64", "--method", "plain,per_layer"]
    plain, layer = json.loads(call(*arguments, "--json").output)
    expected = scaling.forecast("per_layer", job())
    assert layer["sent"] == expected.sent
    assert layer["memory"] == expected.memory
    assert sum(layer["seconds"].values()) == pytest.approx(expected.time.total)
    assert plain["speed"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--parameters", "5"], "parameters='5' is unknown. Expected one of 0.1,"),
        (["--accelerators", "8,many"], "accelerators='many' is no positive integer"),
        (["--accelerators", "0"], "accelerators='0' is no positive integer"),
        (["--hardware", "abacus"], "hardware='abacus' is unknown"),
        (["--method", "magic"], "method='magic' is unknown"),
        (["--batch-size", "0"], "expected_batch_size=0 is out of range"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments, text):
    done = call(*arguments)
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())


def test_the_table_fits_a_terminal_and_says_what_its_columns_are(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = call()
    assert done.exit_code == 0
    assert "\u2026" not in done.output, "no cell is cut"
    head, words = done.output.split("\n\n")
    assert "70,213" in head
    for title, meaning in MEANINGS.items():
        assert title in COLUMNS
        assert re.search(rf"^{title} +{re.escape(meaning)}$", words, re.M)


def test_the_tables_of_the_page_are_what_their_commands_print():
    shown = re.findall(r"```sh\ndualdp (scale .*?)\n```\n\n((?:\|.*\n)+)", PAGE.read_text())
    assert len(shown) == 2
    for command, table in shown:
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, done.output
        assert done.output == table, f"run: dualdp {command}"
