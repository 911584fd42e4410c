"""The laws of the two streams: consistency of phases, degeneration to the Transformer, isolation, causality.

Attention runs in blocks of 8 rows here, so that every law crosses block edges.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orthros_jax import streams
from orthros_jax.loss import cross_entropy
from orthros_jax.model.attention import Streams, output_rope
from orthros_jax.model.layers import rope_table
from pallas_kernels.dual_stream_attention import xla

from .small import backends, fast_jit, graph_of, logits, random_params, small_config

pytestmark = pytest.mark.usefixtures("compile_cache")

T, W = 20, 4
KINDS = ("orthros", "transformer", "sliding_window")


@pytest.fixture(autouse=True, scope="module")
def _blocks_of_eight_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_block_size", lambda length: min(length, 8))
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture(params=backends())
def impl(request):
    return request.param


def _ints(x):
    return jnp.asarray(x, jnp.int32)


def _tokens(shape, config, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape)


def _alone(config, params, document):
    """Logits of every row of one document by itself, in the pretraining layout."""
    layout, _ = streams.pretraining(_ints([[*document, 0]]))
    return np.asarray(logits(config, params, layout)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_consistency_of_phases(kind, impl):
    config = small_config(kind=kind, attention_impl=impl)
    params = random_params(config)
    a, b = _tokens(T, config, 1), _tokens(T, config, 2)
    b_length = 13
    alone_a, alone_b = _alone(config, params, a), _alone(config, params, b)[:b_length]
    close = {"rtol": 0, "atol": 1e-4}

    # Packed behind another document and in front of padding, in a batch with the other order.
    packed = np.zeros((2, T + b_length + 4), int)
    segments = np.zeros_like(packed)
    packed[0, :T], packed[0, T : T + b_length] = a, b[:b_length]
    segments[0, :T], segments[0, T : T + b_length] = 1, 2
    packed[1, :b_length], packed[1, b_length : T + b_length] = b[:b_length], a
    segments[1, :b_length], segments[1, b_length : T + b_length] = 1, 2
    layout, _ = streams.pretraining(_ints(packed), _ints(segments))
    rows = np.asarray(logits(config, params, layout))
    np.testing.assert_allclose(rows[0, :T], alone_a, **close)
    np.testing.assert_allclose(rows[0, T : T + b_length], alone_b, **close)
    np.testing.assert_allclose(rows[1, :b_length], alone_b, **close)
    np.testing.assert_allclose(rows[1, b_length : T + b_length], alone_a, **close)

    # Fine-tuning: scattered response tokens of the same packed rows, room for two more.
    response = np.random.default_rng(3).random(packed.shape) < 0.4
    most = int((response[:, 1:] & (segments[:, :-1] == segments[:, 1:]) & (segments[:, 1:] > 0)).sum(1).max())
    tuned, targets = streams.fine_tuning(_ints(packed), _ints(segments), jnp.asarray(response), most + 2)
    assert tuned.out_index is not None
    some_rows = np.asarray(logits(config, params, tuned))
    assert np.isfinite(some_rows).all()
    index, weights = np.asarray(tuned.out_index), np.asarray(targets.weights)
    assert weights.sum() > 10
    for r in range(2):
        chosen = index[r] >= 0
        assert 0 < chosen.sum() < len(chosen)
        np.testing.assert_allclose(some_rows[r, chosen], rows[r, index[r, chosen]], **close)

    # Prefill of prompts of every length, with rubbish behind them.
    lengths = np.array([T, 1, W, W + 1, 8, 9, 0, 17])
    prompts = np.stack([np.where(np.arange(T) < n, a, 7) for n in lengths])
    last = np.asarray(logits(config, params, streams.prefill(_ints(prompts), _ints(lengths))))[:, 0]
    assert np.isfinite(last).all()
    for n, row in zip(lengths, last, strict=True):
        if n > 0:
            np.testing.assert_allclose(row, alone_a[n - 1], **close)


def test_orthros_with_a_wide_window_is_the_transformer(impl):
    transformer = small_config(kind="transformer", qk_norm=True, attention_impl=impl)
    params = random_params(transformer)
    layout, _ = streams.pretraining(_ints(_tokens((2, T + 1), transformer)))
    expected = np.asarray(logits(transformer, params, layout))
    shared = dataclasses.replace(transformer, kind="orthros", query_sharing="shared", window=T)
    np.testing.assert_allclose(logits(shared, params, layout), expected, rtol=0, atol=1e-4)

    identity = dataclasses.replace(shared, query_sharing="scale_offset")
    pairs = _with_scale_offset(params, identity)
    np.testing.assert_allclose(logits(identity, pairs, layout), expected, rtol=0, atol=1e-4)

    narrow = np.asarray(logits(dataclasses.replace(identity, window=W), pairs, layout))
    np.testing.assert_allclose(narrow[:, :W], expected[:, :W], rtol=0, atol=1e-4)
    assert np.abs(narrow[:, W:] - expected[:, W:]).max(axis=(0, 2)).min() > 1e-2


def _with_scale_offset(params, config):
    """The parameters of a Transformer with freshly initialised scales and offsets."""
    fresh = nnx.to_pure_dict(nnx.state(nnx.merge(graph_of(config), random_params(config)), nnx.Param))
    result = jax.tree.map(lambda x: x, params)
    for part in ("layers", "last_layer"):
        for name, pair in fresh[part]["attention"].items():
            if name.startswith("scale_offset"):
                result[part]["attention"][name] = {
                    "gamma": jnp.ones_like(pair["gamma"]),
                    "beta": jnp.zeros_like(pair["beta"]),
                }
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_a_row_are_isolated(kind, impl):
    config = small_config(kind=kind, attention_impl=impl)
    params = random_params(config)
    segments = np.array([[1] * 11 + [2] * 13 + [0] * 3])
    first, second = slice(0, 11), slice(11, 24)
    tokens = _tokens(segments.shape, config)
    layout, _ = streams.pretraining(_ints(tokens), _ints(segments))
    before = np.asarray(logits(config, params, layout)[0])
    other = tokens.copy()
    other[0, first] = (other[0, first] + 1 + _tokens(11, config)) % config.vocab_size
    assert (other[0, first] != tokens[0, first]).any()
    changed, _ = streams.pretraining(_ints(other), _ints(segments))
    after = np.asarray(logits(config, params, changed)[0])
    np.testing.assert_array_equal(after[second], before[second])
    assert np.abs(after[first] - before[first]).max() > 0.1


@pytest.mark.parametrize("kind", ["orthros", "transformer"])
def test_loss_of_one_document_has_no_gradient_in_another_nor_in_padding(kind, impl):
    config = small_config(kind=kind, vocab_size=30, attention_impl=impl)
    params = random_params(config)
    # Every row has a token of its own, so that rows of the embedding are rows of the sequence.
    tokens = np.random.default_rng(0).permutation(28)[None]
    segments = np.array([[1] * 11 + [2] * 13 + [0] * 4])
    layout, targets = streams.pretraining(_ints(tokens), _ints(segments))
    model = graph_of(config)

    def loss(params, weights):
        merged = nnx.merge(model, params)
        return cross_entropy(merged(layout), merged.head_kernel(), streams.Targets(targets.labels, weights)).objective

    gradient = fast_jit(jax.grad(loss))
    row = np.arange(27)
    of_second = gradient(params, targets.weights * (row > 11))["embedding"]["kernel"][tokens[0]]
    of_first = gradient(params, targets.weights * (row < 11))["embedding"]["kernel"][tokens[0]]
    of_second, of_first = np.abs(of_second).max(axis=1), np.abs(of_first).max(axis=1)
    np.testing.assert_array_equal(of_second[:11], 0)
    np.testing.assert_array_equal(of_first[11:], 0)
    assert (of_second[11:23] > 0).all()
    assert (of_first[:10] > 0).all()
    # Padding, and the last row of each document, whose duplicate has no label and whose key nobody reads.
    np.testing.assert_array_equal(of_second[23:], 0)
    np.testing.assert_array_equal(of_first[10:], 0)


def test_a_copied_document_is_no_easier():
    """Only the mask isolates: with positions restarted and one segment, the copy can be read."""
    config = small_config(attention_impl="xla")
    params = random_params(config)
    document = _tokens(20, config)
    packed = _ints([[*document, *document, 0]])
    segments = _ints([[1] * 20 + [2] * 20 + [0]])
    layout, targets = streams.pretraining(packed, segments)
    rows = np.asarray(logits(config, params, layout)[0])
    np.testing.assert_allclose(rows[20:], rows[:20], rtol=0, atol=1e-5)
    assert layout.segment_ids is not None
    leaking = dataclasses.replace(layout, segment_ids=jnp.ones_like(layout.segment_ids))
    assert np.abs(np.asarray(logits(config, params, leaking))[0, 20:] - rows[20:]).max() > 0.1
    np.testing.assert_array_equal(targets.weights[0], [1] * 19 + [0] + [1] * 19 + [0])


def _context_and_output_rows(config, params, layout, embedded):
    """Context rows behind the hidden layers and final output rows for embeddings [T, D]."""
    model = nnx.merge(graph_of(config), params)
    table = rope_table(layout.positions, config)
    rope = Streams(table, output_rope(table, layout))
    doubled = model.last_layer.attention.kind.doubled
    rows = Streams(embedded[None], streams.duplicate(embedded[None], layout) if doubled else None)
    rows = model._hidden_layers(rows, layout, rope)
    if not doubled:
        rows = Streams(rows.context, streams.duplicate(rows.context, layout))
    return rows.context[0], model.last_layer(rows, layout, rope).output[0]


@pytest.mark.parametrize("kind", KINDS)
def test_causality_and_receptive_field_by_gradient(kind, impl):
    config = small_config(kind=kind, attention_impl=impl)
    params = random_params(config)
    out_index = _ints([[0, 2, 9, 10, 19]])
    tokens = _ints(_tokens((1, T), config))
    layout = streams.Layout(tokens, jnp.arange(T, dtype=jnp.int32)[None], None, out_index)
    embedded = params["embedding"]["kernel"][tokens[0]]
    weigh = jax.random.normal(jax.random.key(1), (config.model_dim,))

    def scores(embedded):
        context, output = _context_and_output_rows(config, params, layout, embedded)
        return jnp.concatenate([context, output]) @ weigh

    jacobian = fast_jit(jax.jacrev(scores))(embedded)
    depends = np.asarray(jnp.abs(jacobian).max(axis=-1) != 0)
    t, j = np.arange(T)[:, None], np.arange(T)
    hidden = config.num_layers - 1
    reach = T if kind == "transformer" else hidden * (W - 1)
    np.testing.assert_array_equal(depends[:T], (j <= t) & (t - j <= reach))
    t = np.asarray(out_index[0])[:, None]
    reach = config.num_layers * (W - 1) if kind == "sliding_window" else T
    np.testing.assert_array_equal(depends[T:], (j <= t) & (t - j <= reach))


def test_padding_changes_nothing(impl):
    """Rows of 8 and 3 tokens and one of padding: the loss and gradients of the first two alone."""
    config = small_config(vocab_size=30, attention_impl=impl)
    params = random_params(config)
    tokens = np.random.default_rng(0).permutation(27).reshape(3, 9)
    segments = np.array([[1] * 9, [1] * 4 + [0] * 5, [0] * 9])

    @fast_jit
    def sums_and_gradient(params, layout, targets):
        def objective(params):
            model = nnx.merge(graph_of(config), params)
            sums = cross_entropy(model(layout), model.head_kernel(), targets)
            return sums.objective, sums.weight

        return jax.value_and_grad(objective, has_aux=True)(params)

    padded = streams.pretraining(_ints(tokens), _ints(segments))
    (loss, weight), gradient = sums_and_gradient(params, *padded)
    assert weight == 11
    alone = [
        sums_and_gradient(params, *streams.pretraining(_ints(tokens[:1]))),
        sums_and_gradient(params, *streams.pretraining(_ints(tokens[1:2, :4]))),
    ]
    np.testing.assert_allclose(loss, sum(a[0][0] for a in alone), rtol=1e-5)
    jax.tree.map(
        lambda g, a, b: np.testing.assert_allclose(g, a + b, rtol=1e-4, atol=1e-5),
        gradient,
        *(a[1] for a in alone),
    )
    np.testing.assert_array_equal(gradient["embedding"]["kernel"][tokens[2]], 0)
    np.testing.assert_array_equal(gradient["embedding"]["kernel"][tokens[1, 4:]], 0)

    nothing = streams.pretraining(_ints(tokens), jnp.zeros_like(_ints(segments)))
    (loss, weight), gradient = sums_and_gradient(params, *nothing)
    assert loss == 0
    assert weight == 0
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), gradient)


def test_a_window_of_four_averages_four_keys(impl):
    """With equal scores row 7 averages the values of exactly rows 4 to 7, and row 2 those of rows 0 to 2."""
    config = small_config(num_layers=2, attention_impl=impl)
    params = random_params(config)
    params["layers"]["attention"]["key"]["kernel"] *= 0
    model = nnx.merge(graph_of(config), params)
    layer = nnx.merge(nnx.graphdef(model.layers), jax.tree.map(lambda x: x[0], nnx.state(model.layers)))
    layout, _ = streams.pretraining(_ints(_tokens((1, 9), config)))
    table = rope_table(layout.positions, config)
    rows = jax.random.normal(jax.random.key(0), (1, 8, config.model_dim))
    context, output = layer.attention(Streams(rows, rows), layout, Streams(table, table))
    values = layer.attention.value(rows)

    def project(keys):
        mean = jnp.repeat(values[0, keys].mean(axis=0), config.num_heads // config.num_kv_heads, axis=0)
        return layer.attention.output(mean)

    for row, keys in ((7, [4, 5, 6, 7]), (2, [0, 1, 2]), (3, [0, 1, 2, 3]), (4, [1, 2, 3, 4])):
        np.testing.assert_allclose(context[0, row], project(np.array(keys)), atol=1e-5)
        np.testing.assert_allclose(output[0, row], project(np.arange(row + 1)), atol=1e-5)
