"""The answer that `baton demo` must stream.

transformers `generate` computed it greedily on SmolLM2-135M-Instruct in float32. The two best logits differ by at least
0.027 everywhere, so the rounding of a correct implementation changes no token.
"""

QUESTION = "Why is the sky blue?"
# fmt: off
TOKEN_IDS = (
    504, 2988, 288, 451, 1962, 5721, 281, 260, 7564, 7180, 282, 1420, 284, 2380, 30, 378,
    6376, 4541, 4461, 975, 282, 253, 7613, 1343, 347, 13739, 43464, 24484, 30, 669, 4149, 645,
    1420, 13242, 6756, 282, 1512, 28, 527, 15802, 260, 9895, 20518, 282, 1420, 28, 2755, 260,
    4461, 1420, 28, 281, 253, 970, 338, 4461, 4541, 288, 325, 260, 768, 13490, 30,
)
# fmt: on
