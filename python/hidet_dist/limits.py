"""The bounds of values and files from outside, each with its reason. They are checked before any work.

Sizes are bytes. A value beyond a bound is refused with an error that states the bound.
"""

from __future__ import annotations

MOST_DEVICES = 2**14
"""Devices of a mesh: a build writes a file for each of them, and all ranks of a program connect to one store."""

MOST_CACHE_BYTES = 2**31
"""The cache of compiled code: a kernel takes 100 KB, and precompiled headers 27 MB for each choice of flags."""

MOST_MANIFEST_BYTES = 2**26
"""A manifest has about 200 bytes a kernel launch and 150 a file; that of 16384 ranks and 100,000 launches fits."""

MOST_PLAN_BYTES = 2**28
"""A plan has about 300 bytes an operator, and its report a few times that; a model of a hundred layers has 10,000."""

MOST_INDEX_BYTES = 2**28
"""An index of safetensors files has about 120 bytes a tensor; there are none of more than a few 100,000 tensors."""

MOST_CONFIGURATION_BYTES = 2**24
"""The config.json of a transformers model: one with the names of 20,000 labels has 2 MB."""

MOST_CONFIGURATION_VALUES = 2**18
"""The values of JSON in such a file, names included: one with the names of 20,000 labels has 80,000."""

MOST_CONFIGURATION_DEPTH = 16
"""Objects and lists within one another in such a file: those of transformers' models have up to 6."""

MOST_CONFIGURATION_FIELDS = 64
"""Fields of one object of such a file that are tried out to find the one to blame for an error."""

MOST_LAYERS = 2**10
"""Layers by a configuration: the deepest models have a thousand, which take half a minute to trace."""

MOST_ENTRIES = 2**18
"""Labels, experts, heads and the like by a configuration: transformers makes lists of some of them first."""

MOST_PARAMETERS = 2**16
"""Parameter tensors of a model: Switch Transformer with 2048 experts in 12 layers has 50,000."""

MOST_PARAMETER_BYTES = 2**37
"""One parameter, whose memory is not used: the experts of a layer, stacked, have up to 2**36 in float32."""

MOST_TABLE_BYTES = 2**31
"""One tensor that a model computes when it is made: a mask of 32768 by 32768 positions has 2**30."""

MOST_HEADER_BYTES = 100_000_000
"""The header of a safetensors file: the bound of the safetensors library itself."""

MOST_HEADER_VALUES = 2**23
"""The values of JSON in such a header, or in an index of such files: a tensor has ten, and few models 100,000 tensors.
Each takes up to 64 bytes."""

MOST_GGUF_HEADER_BYTES = 2**28
"""The header of a GGUF file: a vocabulary of 260,000 tokens and its merges have about 20 MB."""

MOST_GGUF_ENTRIES = 2**22
"""Keys, tensors, and elements of all lists in such a header: the largest vocabularies have 2**18 tokens, each with a
score and a type, and 2**19 merges. Each takes up to 60 bytes beside its text."""

MOST_TOKEN_CHARACTERS = 2**30
"""The squares of the lengths of all tokens of a vocabulary in a GGUF file, summed, in characters: merges are found by
cutting each token in two at each place. Vocabularies of 2**18 tokens have about 2**24."""

MOST_TOKENIZER_BYTES = 2**28
"""The tokenizer.json of a language model: that of a vocabulary of 260,000 tokens has 33 MB."""

MOST_TOKENIZER_SECONDS = 30.0
"""The processor time of reading one: that of a vocabulary of 260,000 tokens takes about 1 s."""

MOST_PROMPT_TOKENS = 2**23
"""A prompt: the longest contexts have some million tokens."""

MOST_PROMPT_CHARACTERS = 2**26
"""A prompt made by a chat template: the longest contexts have some million tokens."""

MOST_CONFINED_BYTES = 2**31
"""The address space of a process that renders chat templates, tries grammars or has a tokenizer: four prompts of the
most characters."""

MOST_CONFINED_SECONDS = 3.0
"""The processor time of one such task: templates of a million tokens take about 0.1 s, grammars of tools 0.1 s, and the
tokens of 5 MB of text 2 s."""

MOST_GRAMMAR_CHARACTERS = 2**17
"""A JSON schema, regular expression or grammar of an answer: OpenAI's interface takes schemas of 120,000 characters."""

MOST_BODY_BYTES = 2**25
"""The body of a request over HTTP: a prompt of a million tokens, as numbers, has about 7 MB."""

MOST_BODY_VALUES = 2**21
"""The values of JSON in such a body: a prompt of a million tokens, as numbers, has 2**20."""

MOST_HEAD_BYTES = 2**16
"""The request line and the headers of a request over HTTP: those of clients have less than 2**13."""

MOST_MACHINE_BYTES = 2**20
"""A machine file has a few kilobytes: one device, and a link for each mesh axis."""

MOST_SOLVER_THREADS = 1024
"""Threads of the solver: more than any host has processors to run them on."""

MOST_SECONDS = 1e9
"""A time limit, about 32 years: solvers take one as seconds in double precision, some as an int of 32 bits."""

MOST_BYTES = 2**63 - 1
"""An amount of memory: the largest int64, the type in solvers and the runtime."""

MOST_NAME_BYTES = 200
"""The last part of an out_dir: Linux's file systems allow 255 bytes, and folders beside it have longer names."""

MOST_CANDIDATES = 2**16
"""Candidates of one kernel: hidet's largest search spaces have a few thousand."""

MOST_PROBLEM_BYTES = 2**31
"""A file of a pairwise problem, unpacked: the largest of the contest's 25 instances has about 200 MB."""

MOST_MICRO_BATCHES = 2**16
"""Micro-batches of a call: a batch of more samples than that is cut into larger ones."""

MOST_PROTOBUF_BYTES = 2**31 - 1
"""An ONNX file: the bound of a message of protocol buffers. Larger models have their weights in other files."""

MOST_NESTED = 200
"""Lists and objects of JSON in one another: artifacts have about ten levels, arguments of a model a few more."""

MOST_NODES = 2**16
"""Nodes of an ONNX model with its functions inlined: those of hundreds of layers have some 10,000, which take 1 ms and
10 KB each."""

MOST_KNOWN_ELEMENTS = 2**28
"""Elements that nodes of an ONNX model read and write while it is traced, to compute shapes, indices and masks: a mask
of a thousand positions for each of a hundred layers takes 2**27. Each has up to 8 bytes, and takes up to 0.5 us. The
constants that its nodes become have as many at most."""

MOST_ONNX_ENTRIES = 2**18
"""Nodes, initializers, inputs, outputs and described values of an ONNX graph: four for each of the most nodes."""

MOST_ONNX_MESSAGES = 2**20
"""Nodes, attributes, tensors, types and the like of an ONNX file: a node has about 14, with the tensors that it reads
and writes. Parsed and checked, one takes up to 700 bytes."""

MOST_ONNX_FIELDS = 2**22
"""Numbers, texts and messages in the messages of an ONNX file, without the elements of weights; four a message."""

MOST_ONNX_NUMBERS = 2**28
"""Numbers of 7 bits a byte in the tensors of an ONNX file, where weights of few bits are lists of numbers instead of
raw data. Parsed, each takes 4 or 8 bytes."""

MOST_ONNX_NAME_BYTES = 2**16
"""A name in an ONNX file: those of nodes that converters made of many join the names of all, in some thousand bytes."""

MOST_OPERANDS = 2**12
"""Inputs or outputs of a node of an ONNX model: those of models join or add up to some hundred tensors."""

MOST_DIMS = 64
"""The dims of a tensor: the bound of NumPy and of PyTorch, which hold inputs and outputs."""

MOST_PLACES = 2**24
"""A dim that is padded by its own elements, or masked: their numbers are a constant, of 128 MB at this bound."""
