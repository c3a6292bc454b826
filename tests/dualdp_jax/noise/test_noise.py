# SPDX-License-Identifier: Apache-2.0
"""Noise on JAX: of the planned size, once for each release, the same through optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dualdp_jax as dpj
from dualdp import AccountingError, randomness
from dualdp.ledger.ledger import Release
from dualdp.plan.plan import NOISE
from dualdp.plan.schedules import AdaptiveNorm, Linear
from dualdp.randomness import key_of, noise_bits, seeded_bits, threefry
from dualdp_jax.noise import noise
from dualdp_jax.noise.noise import NoiseSource, noised_mean
from dualdp_jax.training import step as step_module
from tests.dualdp_jax import runs

KEY = np.asarray([0x01234567, 0xFEDCBA98], np.uint32)


def make_plan(**changes):
    given = {"num_examples": 100, "expected_batch_size": 20, "num_steps": 3, "seed": 5}
    return runs.make_plan(**given | {"noise_multiplier": 1.5, "max_grad_norm": 2.0} | changes)


OPEN = []


@pytest.fixture(autouse=True)
def loops_end():
    """Releases of an engine that a traceback keeps are not those of the next test."""
    yield
    while OPEN:
        OPEN.pop().detach()


def on_record(plan, num_steps=None):
    """The engine of a loop of one's own in which so many steps are on record."""
    engine = dpj.PrivacyEngine()
    engine.make_loader(data=np.zeros((plan.num_examples, 1), "f"), plan=plan)
    OPEN.append(engine)
    if num_steps:
        engine.record(num_steps=num_steps)
    return engine


# ---------------------------------------------------------------------- what the noise is


@pytest.mark.parametrize(
    ("noise", "dtype"), [("fast", "float32"), ("portable", "float32"), ("portable", "float64")]
)
def test_noise_is_the_counter_generator(noise, dtype, monkeypatch):
    """Fast noise is that of large leaves; its small ones are drawn together."""
    monkeypatch.setattr("dualdp_jax.noise.noise._SMALL", 0)
    jax.clear_caches()
    plan = make_plan(noise=noise)
    with jax.enable_x64(dtype == "float64"):
        grads = {"b": jnp.ones((3, 2), dtype), "a": None, "c": jnp.zeros((), dtype)}
        noisy = dpj.noisy_mean(grads, plan, 1)
    key = key_of(seeded_bits(5, "noise", 1))
    for index, name in enumerate("bc"):
        shape, kind = grads[name].shape, np.dtype(dtype).type
        normal = threefry.normal(threefry.fold_in(key, index), shape, dtype=kind)
        expected = (np.asarray(grads[name]) + 3.0 * normal) / 20
        rtol = 1e-6 if dtype == "float32" else 1e-11
        np.testing.assert_allclose(noisy[name], expected, rtol=rtol, atol=rtol)
        assert noisy[name].dtype == dtype
    assert noisy["a"] is None


def test_small_leaves_are_drawn_together():
    """By one draw of one key, whose numbers are theirs in order; of wide ones in low precision."""
    plan = make_plan(noise_multiplier=0.5)
    sums = {"a": jnp.zeros((3, 4)), "b": jnp.zeros(5, jnp.bfloat16)}
    noisy = dpj.noisy_mean(sums, plan, 1)
    key = threefry.fold_in(key_of(seeded_bits(5, "noise", 1)), 2)
    expected = threefry.normal(key, 17, dtype=np.float32) / 20
    found = np.concatenate([noisy["a"].ravel(), noisy["b"]])
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    assert noisy["b"].dtype == jnp.float32


def test_small_leaves_cost_one_draw_of_a_program():
    """Each takes longer to compile than the sum that it is added to."""
    leaves = [jnp.zeros(size) for size in range(3, 9)]
    release, count = Release(0, 0, 0, 1.0, 1.0, 1.0, 20.0), {}
    for kind in ("fast", "portable"):
        drawn = NoiseSource(make_plan(noise=kind)).drawn(leaves, release, bytes(64))
        count[kind] = str(jax.make_jaxpr(noised_mean)(leaves, drawn)).count("random_bits[")
    assert count["fast"] == 1 < len(leaves) <= count["portable"]


def test_secure_noise_compiles_once_and_keeps_its_structure():
    """Noise comes in as data, like the key of the other modes."""
    plan = make_plan(noise="secure", seed=None)
    sums = {"b": jnp.ones((3, 2), jnp.bfloat16), "a": None, "c": jnp.zeros(()), "e": jnp.zeros(0)}
    source, update = NoiseSource(plan), jax.jit(lambda sums, drawn: noised_mean(sums, drawn))
    engine = on_record(plan)
    for step in range(3):
        release = engine.ledger.record(step)
        drawn = source.drawn(jax.tree.leaves(sums), release, noise_bits(None, step))
        mean, expected = update(sums, drawn), noised_mean(sums, drawn)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mean, expected)
    assert update._cache_size() == 1
    assert mean["b"].dtype == jnp.float32
    assert mean["e"].shape == (0,)


def test_the_old_layout_is_refused_before_a_ledger_begins(tmp_path):
    path, data = tmp_path / "ledger.jsonl", (runs.X, runs.Y)
    with jax.threefry_partitionable(False):
        with pytest.raises(ValueError, match="jax_threefry_partitionable=False"):
            runs.private(plan=runs.make_plan(), ledger=path)
        with pytest.raises(ValueError, match="jax_threefry_partitionable=False"):
            dpj.PrivacyEngine().make_loader(data=data, plan=runs.make_plan(), ledger=path)
    assert not path.exists()


# ---------------------------------------------------------------------- once for each release


def test_what_nobody_records_has_no_noise():
    """known_failures 79 and 85: releases that nobody recorded, at epsilon 0.0."""
    plan, sums = make_plan(seed=None), {"a": jnp.ones(3)}
    for call in (
        lambda: dpj.noisy_mean(sums, plan, 0),
        lambda: dpj.add_noise(plan).update(sums, dpj.add_noise(plan).init(sums)),
        lambda: jax.jit(lambda s, k: dpj.noisy_mean(s, plan, 0, key=k))(sums, KEY),
    ):
        with pytest.raises(
            AccountingError, match="no loop that is open records the releases of th"
        ):
            call()
    engine = on_record(plan, 1)
    dpj.noisy_mean(sums, plan, 0)
    for step in (0, 1):  # drawn before, and not on record
        with pytest.raises(AccountingError, match=f"step={step} has no release on record whose"):
            dpj.noisy_mean(sums, plan, step)
    with pytest.raises(AccountingError, match="1 releases was asked for, and 0 are on record"):
        dpj.noise_keys(1)
    assert engine.ledger.get_epsilon() > 0


@pytest.mark.parametrize("noise", NOISE)
def test_add_noise_is_noisy_mean(noise, monkeypatch):
    """With the same bits, which are fresh otherwise."""
    plan, sums = make_plan(noise=noise, seed=None), {"a": jnp.arange(4.0), "b": jnp.ones((2, 3))}
    monkeypatch.setattr(randomness.bits, "fresh_bits", lambda size=64: bytes(range(size)))
    engine = on_record(plan, 3)
    releases = dict(engine.ledger.unused)
    tx = optax.chain(dpj.add_noise(plan), optax.sgd(1.0))
    state = tx.init(sums)
    source = NoiseSource(plan)
    for step in range(3):
        updates, state = tx.update(sums, state)
        expected = source.noisy_mean(sums, releases[step], bytes(range(64)))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, -b), updates, expected)


# ---------------------------------------------------------------------- inside the user's own jit


def test_add_noise_runs_in_a_scan():
    """With a seed: the noise of noisy_mean, the schedules of its steps, one program."""
    schedule = Linear(2.0, 1.0, 3)
    plan = make_plan(noise_multiplier=schedule, expected_batch_size=lambda step: 20 + step)
    expected = [dpj.noisy_mean({"a": jnp.zeros(3)}, plan, step)["a"] for step in range(3)]
    on_record_engine = on_record(plan, 3)
    tx = dpj.add_noise(plan)

    def body(state, key):
        updates, state = tx.update({"a": jnp.zeros(3)}, state, key=key)
        return state, updates

    run = jax.jit(lambda s, keys: jax.lax.scan(body, s, keys))
    keys = dpj.noise_keys(3)
    assert (keys.shape, keys.dtype) == ((3, 2), jnp.uint32)
    _, updates = run(tx.init({"a": jnp.zeros(3)}), keys)
    np.testing.assert_allclose(updates["a"], expected, rtol=1e-6)
    past = jax.jit(lambda t, k: dpj.noisy_mean({"a": jnp.zeros(3)}, plan, t, key=k))(3, keys[0])
    assert np.isnan(past["a"]).all()
    assert len(on_record_engine.ledger) == 3


def test_noise_keys_are_fresh():
    plan = make_plan(seed=None, num_steps=600)
    engine = on_record(plan, 600)
    keys = np.concatenate([dpj.noise_keys(200), dpj.noise_keys(400)])
    assert len(np.unique(keys, axis=0)) == 600
    assert 0.49 < np.unpackbits(keys.view(np.uint8)).mean() < 0.51
    with pytest.raises(AccountingError, match="0 are on record whose noise was not drawn"):
        dpj.noise_keys(1)
    assert len(engine.ledger) == 600


CONSTANT, IN_VMAP = "where every turn would add the", "is inside vmap|is inside jit, scan, vmap"


def mean_of(plan, **key):
    return lambda s: dpj.noisy_mean(s, plan, 0, **key)


def over_a_mesh(call, sums):
    mesh, rows = jax.make_mesh((1,), ("x",)), jax.P("x")
    sums = jax.device_put(sums, jax.NamedSharding(mesh, rows))
    run = jax.shard_map(call, mesh=mesh, in_specs=(rows, jax.P()), out_specs=rows)
    return jax.jit(run)(sums, KEY)


TRACED = {
    "no key": (lambda s, p, k, tx: jax.jit(mean_of(p))(s), CONSTANT),
    "a constant": (lambda s, p, k, tx: jax.jit(mean_of(p, key=KEY))(s), CONSTANT),
    "vmap": (lambda s, p, k, tx: jax.vmap(mean_of(p))(s), CONSTANT),
    "scan": (lambda s, p, k, tx: jax.lax.map(mean_of(p, key=KEY), s), CONSTANT),
    "add_noise": (lambda s, p, k, tx: jax.jit(tx.update)(s, tx.init(s)), CONSTANT),
    "keys of vmap": (lambda s, p, k, tx: jax.vmap(k)(s, np.stack([KEY, KEY + 1])), IN_VMAP),
    "a key in vmap": (lambda s, p, k, tx: jax.jit(jax.vmap(k, (0, None)))(s, KEY), IN_VMAP),
    "add_noise in vmap": (
        lambda s, p, k, tx: jax.vmap(lambda s: tx.update(s, tx.init(s), key=KEY))(s),
        IN_VMAP,
    ),
    "shard_map": (
        lambda s, p, k, tx: over_a_mesh(k, s),
        r"is inside shard_map or pmap, over \['x'\]",
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_function_needs_a_key_that_is_data(name):
    """known_failures 79: the same noise at every call or for all members, and the key inside."""
    plan, (call, said) = make_plan(), TRACED[name]
    of_key = lambda s, k: dpj.noisy_mean(s, plan, 0, key=k)  # noqa: E731
    with pytest.raises(TypeError, match=said):
        call(jnp.ones((2, 3)), plan, of_key, dpj.add_noise(plan))


def test_a_key_that_is_used_twice_is_refused():
    """Where it can be seen: outside of jit, and in one program."""
    plan, sums = make_plan(seed=None), {"a": jnp.ones(3), "b": jnp.ones(3)}
    engine = on_record(plan, 3)
    first, second, third = dpj.noise_keys(3)
    dpj.noisy_mean(sums, plan, 0, key=first)
    dpj.noisy_mean(sums, plan, 1, key=second)
    with pytest.raises(AccountingError, match="key= came twice, for releases whose diff"):
        dpj.noisy_mean(sums, plan, 2, key=second)
    tx = dpj.add_noise(plan)
    both = optax.multi_transform({"a": tx, "b": tx}, {"a": "a", "b": "b"})
    with pytest.raises(AccountingError, match="key= came twice"):
        jax.jit(lambda s, k: both.update(s, both.init(s), s, key=k))(sums, third)
    assert engine.ledger.get_epsilon() > 0


def test_one_noise_is_not_given_to_two_sums_of_a_program():
    plan = make_plan(seed=None)
    engine = on_record(plan, 2)
    mean = lambda sums, key: dpj.noisy_mean(sums, plan, 0, key=key)  # noqa: E731
    for twice in (
        lambda a, b, key: (mean(a, key), mean(b, key)),
        lambda a, b, key: jax.lax.map(lambda g: mean(g, key), jnp.stack([a, b])),
    ):
        with pytest.raises((AccountingError, TypeError), match="came twice|where every turn would"):
            jax.jit(twice)(jnp.zeros(3), jnp.ones(3), dpj.noise_keys(1)[0])
    assert len(engine.ledger) == 2


REFUSED = {
    "a plan with .* noise='secure'": {"noise": "secure", "seed": None},
    "or an adaptive max_grad_norm": {"max_grad_norm": AdaptiveNorm(1.0)},
    "follows a schedule without end": {"num_steps": None, "noise_multiplier": Linear(2.0, 1.0, 3)},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_program_can_not_know_is_refused(said):
    plan = make_plan(**REFUSED[said])
    engine = on_record(plan)
    mean = jax.jit(lambda key: dpj.noisy_mean(jnp.ones(3), plan, 0, key=key))
    with pytest.raises(ValueError, match=said):
        mean(KEY)
    assert len(engine.ledger) == 0


# ---------------------------------------------------------------------- where it is not


@pytest.fixture
def compiled_here(tmp_path):
    """JAX's persistent compilation cache lies in this folder, and everything is compiled anew."""

    def move(folder):
        compilation_cache.reset_cache()
        jax.clear_caches()
        jax.config.update("jax_compilation_cache_dir", folder)

    before = jax.config.jax_compilation_cache_dir
    move(str(tmp_path))
    yield
    move(before)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("noise", ["fast", "secure"])
def test_no_file_of_a_run_holds_the_bits(noise, tmp_path, monkeypatch):
    """Neither ledger and checkpoint nor JAX's persistent compilation cache."""
    bits, plan = [], make_plan(noise=noise, seed=None)
    drawn = lambda seed, step: bits.append(noise_bits(seed, step)) or bits[-1]  # noqa: E731
    monkeypatch.setattr(step_module, "noise_bits", drawn)
    data = (np.ones((100, 3), np.float32), np.ones(100, np.float32))
    engine, *run = runs.private(plan=plan, data=data, ledger=tmp_path / "ledger")
    dpj.save_checkpoint(tmp_path / "checkpoint", state=runs.train(*run), engine=engine)
    if noise == "fast":
        on_record(plan, 2)
        for key in dpj.noise_keys(2):
            jax.jit(lambda s, k: dpj.noisy_mean(s, plan, 0, key=k))(jnp.ones(3), key)
            bits.append(np.asarray(key).tobytes())
    assert len(bits) == (5 if noise == "fast" else 3)
    files = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"ledger", "checkpoint"} < set(files)
    assert any(name.endswith("-cache") for name in files)
    for secret in bits:
        words = np.frombuffer(secret[:8], ">u4")
        shown = [secret[:8], words.astype("<u4").tobytes(), secret[:8].hex().encode()]
        shown += [secret[-32:]] if len(secret) == 64 else []
        shown += [str(word).encode() for word in words if word > 10**8]
        for name, content in files.items():
            assert not any(text in content for text in shown), name


def test_a_release_that_has_no_noise_stays_on_record(monkeypatch):
    """An error while it is drawn, such as a full memory: it counts, and the run goes on."""
    plan, sums = make_plan(seed=None), {"a": jnp.ones(3)}
    engine = on_record(plan, 1)
    with monkeypatch.context() as patch:
        patch.setattr(noise, "noised_mean", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            dpj.noisy_mean(sums, plan, 0)
    engine.record()
    dpj.noisy_mean(sums, plan, 1)
    assert len(engine.ledger) == 2


# ---------------------------------------------------------------------- thousands of releases

SUMS = {"w": jnp.zeros(2), "v": jnp.zeros(1)}
OF_RELEASES = {"num_examples": 1000, "expected_batch_size": 50, "num_steps": 10, "seed": None}
OF_RELEASES |= {"noise_multiplier": 1.3, "max_grad_norm": 0.7}


def declared(stddev, numbers):
    """True if the deviation of normals is the declared one, within 5 standard errors."""
    return abs(numbers.std() / stddev - 1) < 5 / np.sqrt(2 * numbers.size)


def independent(one, other):
    """True if two arrays of normals have no correlation, within 5 standard errors."""
    return abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(one.size)


def assert_independent(drawn):
    """Noise (releases, numbers), between releases, halves and numbers."""
    half = len(drawn) // 2
    for column in range(drawn.shape[1]):
        assert independent(drawn[:-1, column], drawn[1:, column])
        assert independent(drawn[:half, column], drawn[half:, column])
        assert independent(drawn[:, column], drawn[:, (column + 1) % drawn.shape[1]])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "portable", "secure"])
def test_releases_share_no_noise(mode):
    """Without a seed: between steps, leaves and segments, whose steps have the same numbers."""
    count = 10_000 if mode == "fast" else 2000
    plan, mean, half, found = (
        runs.make_plan(**OF_RELEASES, noise=mode),
        jax.jit(noised_mean),
        count // 2,
        [],
    )
    source, stddev = NoiseSource(plan), 1.3 * 0.7
    for number in range(count):
        step = number % half  # the second segment runs all steps again
        release = Release(step, number // half, 0, 0.7, 1.3, stddev, 50.0)
        drawn = source.drawn(jax.tree.leaves(SUMS), release, noise_bits(None, step))
        found.append(mean(SUMS, drawn))
    leaves = [np.stack(leaf) for leaf in zip(*map(jax.tree.leaves, found), strict=True)]
    drawn = 50 * np.concatenate(leaves, axis=1).astype(np.float64)  # (releases, 3)
    assert declared(stddev, drawn)
    assert_independent(drawn)
