"""The fusion of operators into CUDA kernels. Nothing is compiled here: nvcc is a substitute that is never called."""

from collections import Counter
from dataclasses import replace

import hidet
import pytest

from hidet_dist.compile import optimize_program
from hidet_dist.compile.cpu.target import CpuTarget
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.normalize.columns import pad_columns
from hidet_dist.normalize.precision import in_precision
from hidet_dist.partitioning import partition_graph
from hidet_dist.partitioning.operators import CommunicationOp
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.testing import shapes

from .conftest import MODELS

pytestmark = pytest.mark.usefixtures("no_compiler")

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])


def launched(graph, ranks=1, **options):
    """The operators that launch a kernel: not those that only rename memory."""
    normal = normalize(graph)
    plan = search(normal, builtin("dgx-h100", DeviceMesh((ranks,))), **options).plan
    program = partition_graph(normal, plan.stages[0], target=H100)
    return [node for node in optimize_program(program, H100).nodes if not node.share_map]


def parts(node):
    """The operators of a launch: several products, or itself."""
    return list(node.task.fused_graph.nodes) if node.name.startswith("Joint") else [node]


def what(node):
    return " ; ".join(part.task.attrs.get("fused_ops", part.task.name) for part in parts(node))


# Two norms, the projections, which are one launch, attention, the output and the two products of the MLP make 7; MiniLM
# prepares its mask once for all layers; GPT-2 puts keys and values behind its cache's; LLaMA has two products of one
# launch in its MLP, scores, softmax and mix one by one, as its heads are too short, and rotates queries and keys by
# tables that it cuts anew.
KERNELS_OF_A_LAYER = {"minilm": 8, "gpt2": 9, "llama": 16}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_as_many_kernels(name):
    one, two = (launched(MODELS[name](layers)) for layers in (1, 2))
    layer = Counter(map(what, two)) - Counter(map(what, one))
    assert len(two) - len(one) == KERNELS_OF_A_LAYER[name], layer
    # No element-wise operator has a kernel of its own, and every projection has what follows it in its kernel.
    assert {kernel for kernel in layer if " " not in kernel} <= {"row_softmax", "concat", "slice"}
    words = "\n".join(map(what, two))
    assert {"minilm": "add gelu", "gpt2": "add gelu", "llama": "silu ;"}[name] in words
    assert {"minilm": "attention", "gpt2": "attention", "llama": "divs add"}[name] in words


def test_layers_that_read_blocks_of_one_cache_have_the_same_kernels():
    two, three = (launched(MODELS["gpt2"](layers)) for layers in (2, 3))
    assert len(three) - len(two) == KERNELS_OF_A_LAYER["gpt2"]
    # The new keys and values of all layers are put together in one kernel, which has their number.
    assert len({str(node.task) for node in three} ^ {str(node.task) for node in two}) == 2


# Norms, projections, attention, output and MLP: 2 + 1 + 1 + 1 + 2 for GPT-2; LLaMA rotates its keys in a kernel of its
# own, its queries in that of attention, and multiplies the two first products of its MLP in a kernel of its own, or in
# the next product, which computes its operand in float32.
LAYERS = {
    ("gpt", "float16"): (7, 10),
    ("gpt", "bfloat16"): (7, 10),
    ("gpt", "float32"): (7, 10),
    ("llama", "float16"): (9, 12),
    ("llama", "float32"): (8, 11),
}
QUICK = (("gpt", "float32"), ("llama", "float16"))


def language_model(name, layers, ranks=1, precision="float16", heads=4):
    if name == "gpt":
        graph = shapes.gpt(shapes.GPTConfig(layers, 256, heads, 512, 1, 64, "float32"))
    else:
        graph = shapes.llama(shapes.LlamaConfig(layers, 256, heads, heads // 2, 512, 512, 1, 64, "float32"))
    graph = graph if precision == "float32" else in_precision(graph, precision).graph
    return launched(graph, ranks)


@pytest.mark.parametrize(
    ("name", "precision"),
    [layer if layer in QUICK else pytest.param(*layer, marks=pytest.mark.slow) for layer in LAYERS],
)
def test_a_layer_of_a_language_model_is_as_many_kernels(name, precision):
    of_a_layer, whole = LAYERS[name, precision]
    one, two = (language_model(name, layers, precision=precision) for layers in (1, 2))
    layer = Counter(map(what, two)) - Counter(map(what, one))
    assert (len(two) - len(one), len(one)) == (of_a_layer, whole), layer
    count = Counter(word for kernel in map(what, one) for word in kernel.split())
    rows = "row_norm" if name == "gpt" else "row_rms_norm"
    assert count[rows] == 3
    assert count["attention"] == 1
    assert not {"reduce_max", "reduce_sum", "reduce_avg", "exp", "row_softmax"} & set(count)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_ranks_add_communication_and_what_it_keeps_apart_but_no_more(name):
    one, two = (language_model(name, 1, ranks, heads=8) for ranks in (1, 2))
    assert sum("attention" in what(node) for node in two) == 1
    assert sum("row_" in what(node) for node in two) == 3
    communication = [node for node in two if isinstance(node, CommunicationOp)]
    assert len(two) - len(one) <= 2 * len(communication)


def mlp():
    x = hidet.symbol([16, 32], "float32", "cpu")
    up, down = hidet.randn([32, 64]), hidet.randn([64, 32])
    return hidet.trace_from(hidet.ops.gelu(x @ up) @ down + x, [x])


# Weights are used as they lie: gathering them beside the products may take less time.
MEGATRON = {"w0": "(R, S0)", "w1": "(S0, R)", "op:0": "?, (R, S0) -> ?", "op:2": "?, (S0, R) -> ?"}


def test_communication_is_a_barrier_and_all_else_is_fused_around_it():
    nodes = launched(mlp(), 2, pins=MEGATRON)
    assert ["gelu" in what(node) for node in nodes] == [True, False, False, False]
    assert ["batch_matmul" in what(node) for node in nodes] == [True, True, False, False]
    assert [node.name for node in nodes][2:] == ["AllReduce", "Add"]


def test_the_kernels_are_as_many_however_many_ranks_there_are():
    counts = set()
    for ranks in (2, 4, 8):
        nodes = launched(mlp(), ranks, pins=MEGATRON)
        counts.add(len({str(node.task) for node in nodes}))
    assert len(counts) == 1


def test_the_same_program_for_the_cpu_is_on_the_cpu():
    graph = normalize(mlp())
    plan = search(graph, builtin("dgx-h100", DeviceMesh((2,)))).plan
    for target, kind in ((None, "cpu"), (CpuTarget(), "cpu"), (H100, "cuda")):
        program = partition_graph(graph, plan.stages[0], target=target)
        tensors = [*program.graph.inputs, *program.graph.outputs, *(y for n in program.graph.nodes for y in n.outputs)]
        assert {x.device.kind for x in tensors} == {kind}


def test_a_graph_on_a_device_and_named_weights_become_a_program_for_it():
    """Traced for a GPU that is not there; an operator without inputs moves along."""
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        x = hidet.symbol([16, 32], "float32", "cuda:0")
        w = hidet.distributed.weight("w", [32, 64], device="cuda:0")
        y = hidet.ops.relu(x @ w) + hidet.full([16, 64], 2.0, "float32", "cuda:0")
        graph = normalize(hidet.trace_from(y, [x]))
    nodes = launched(graph, 2, pins={"w0": "(R, S0)"})
    assert {node.build_target for node in nodes} == {"cuda"}
    stage = search(graph, builtin("cpu", DeviceMesh((2,)))).plan.stages[0]
    on_cpu = partition_graph(graph, stage, target=CpuTarget()).graph
    assert {node.build_target for node in on_cpu.nodes} == {"cpu"}


def words(tied):
    """A head of 50257 words in half precision, of weights of their own or those of the embeddings."""
    x = hidet.symbol([4, 64], "float32", "cpu")
    w = hidet.distributed.weight("w", [50257, 64] if tied else [64, 50257])
    y = hidet.ops.matmul(x, hidet.ops.permute_dims(w, [1, 0]) if tied else w)
    return pad_columns(normalize(in_precision(hidet.trace_from(y, [x]), "float16").graph), 1).graph


@pytest.mark.parametrize(("tied", "kernels"), [(False, 3), (True, 2)])
def test_a_head_of_an_odd_number_of_words_is_for_tensor_cores(tied, kernels):
    """The input is cast, the product follows, and what columns it has too many are cut off as it is cast back."""
    nodes = launched(words(tied))
    assert [node.task.inputs[0].type.dtype.name for node in nodes if "atmul" in node.name] == ["float16"]
    assert len(nodes) == kernels
    assert [int(size) for size in nodes[-1].outputs[0].shape] == [4, 50257]


def test_gpt2_in_half_precision_has_no_product_in_float32():
    graph = shapes.gpt(replace(shapes.GPT2, layers=1))
    for ranks in (1, 2):
        half = pad_columns(normalize(in_precision(graph, "float16").graph), ranks).graph
        nodes = launched(half, ranks, pins={} if ranks == 1 else {"head": "(R, S0)"})
        products = [part for node in nodes for part in parts(node) if "atmul" in part.name]
        assert len(products) == 7  # those of the scores are in the attention kernel
        assert all("MatmulF16Cute" in node.name for node in products)
