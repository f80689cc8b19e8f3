"""What TensorRT 10.3's ONNX parser takes, for graphs that are lowered for it.

The list is that of onnx-tensorrt, docs/operators.md, branch 10.1-GA: operators of opset 9 to 20, for the types that these graphs have
(FP32, FP16, INT64, BOOL; of Clip the floats alone). It is the last one published before 10.3, which takes all of it. Left out are control
flow, sequences, random numbers, images and recurrent layers, which no decoder step has.
"""

TENSORRT_10_OPERATORS = frozenset(
    """
    Abs Add And ArgMax ArgMin Cast Ceil Clip Concat Constant ConstantOfShape Cos CumSum Div Einsum Elu Equal Erf Exp Expand Flatten Floor
    Gather GatherElements GatherND Gelu Gemm Greater GreaterOrEqual HardSigmoid HardSwish Identity LayerNormalization LeakyRelu Less
    LessOrEqual Log LogSoftmax MatMul Max Mean Min Mod Mul Neg Not OneHot Or PRelu Pad Pow Range Reciprocal ReduceL1 ReduceL2 ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round ScatterElements ScatterND Selu Shape Sigmoid Sign Sin Size
    Slice Softmax Softplus Softsign Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK Transpose Trilu Unsqueeze Where Xor
    """.split()  # noqa: SIM905  # a list would take a line for each
)
