"""Second floor: the Transformer encoder-decoder, each part public."""

from asr.model.attention import MultiHeadAttention
from asr.model.config import PRESETS, ModelConfig
from asr.model.decoder import Decoder, DecoderState
from asr.model.dot_product import attention_weights, scaled_dot_product_attention
from asr.model.encoder import Encoder
from asr.model.feed_forward import FeedForward
from asr.model.layers import (
    ConformerEncoderLayer,
    ConvolutionModule,
    Residual,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
)
from asr.model.local_attention import local_attention
from asr.model.masks import causal_mask, length_mask, window_mask
from asr.model.positions import Positions, rotate, sinusoids
from asr.model.subsampling import ConvSubsampling, LinearSubsampling, TokenEmbedding
from asr.model.transformer import Output, Transformer

__all__ = [
    "PRESETS",
    "ConformerEncoderLayer",
    "ConvSubsampling",
    "ConvolutionModule",
    "Decoder",
    "DecoderState",
    "Encoder",
    "FeedForward",
    "LinearSubsampling",
    "ModelConfig",
    "MultiHeadAttention",
    "Output",
    "Positions",
    "Residual",
    "TokenEmbedding",
    "Transformer",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "attention_weights",
    "causal_mask",
    "length_mask",
    "local_attention",
    "rotate",
    "scaled_dot_product_attention",
    "sinusoids",
    "window_mask",
]
