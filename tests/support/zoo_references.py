"""Every entry of the zoo in shapes of milliseconds per step."""

from __future__ import annotations

TINY_GPT = "n_layer=2&n_embd=16&n_head=2&vocab_size=50&n_positions=32"
TINY_ENCODER = "hidden_size=16&num_hidden_layers=2&num_attention_heads=2&intermediate_size=16"
TINY_VIT = f"{TINY_ENCODER}&image_size=16&patch_size=8&num_labels=4"
TINY_BERT = f"{TINY_ENCODER}&vocab_size=50"
TINY_SWIN = "image_size=32&patch_size=4&window_size=4&embed_dim=8&depths=2,2&num_heads=2,4&num_labels=4"
TINY_RESNET = "image_size=32&embedding_size=8&hidden_sizes=8,16&depths=2,1&num_labels=4"
SMALL = {
    "synthetic": "zoo:synthetic?load_ms=0&compute_ms=0&length=64&batch=2",
    "transformers": f"zoo:transformers?model_type=gpt2&batch=2&sequence=8&{TINY_GPT}",
    "timm": "zoo:timm?name=resnet10t&batch=2",
    "gpt2": f"zoo:gpt2?batch=2&sequence=8&{TINY_GPT}",
    "gpt2_large": f"zoo:gpt2_large?batch=2&sequence=8&{TINY_GPT}",
    "gpt2_xl": f"zoo:gpt2_xl?batch=2&sequence=8&{TINY_GPT}",
    "bert": f"zoo:bert?batch=2&sequence=20&{TINY_BERT}",
    "bert_large": f"zoo:bert_large?batch=2&sequence=20&{TINY_BERT}",
    "vit_large": f"zoo:vit_large?batch=2&{TINY_VIT}",
    "vit_huge": f"zoo:vit_huge?batch=2&{TINY_VIT}",
    "swin_tiny": f"zoo:swin_tiny?batch=2&{TINY_SWIN}",
    "swin_base": f"zoo:swin_base?batch=2&{TINY_SWIN}",
    "swin_v2": f"zoo:swin_v2?batch=2&{TINY_SWIN}",
    "resnet50": f"zoo:resnet50?batch=2&{TINY_RESNET}",
    "vgg16": "zoo:vgg16?batch=2&image_size=32&divisor=8&hidden=16&num_labels=4&dropout=0",
    "detector": "zoo:detector?batch=2&image_size=64&width=8&depth=1&num_classes=3&most_boxes=4",
    "monocular_3d": "zoo:monocular_3d?batch=2&height=128&image_width=128&width=8&num_classes=3&num_attributes=2"
    "&most_boxes=3",
    "mixture_of_experts": "zoo:mixture_of_experts?batch=2&sequence=8&vocabulary=50&width=8&depth=2&num_heads=2"
    "&num_experts=3",
    "lstm": "zoo:lstm?batch=2&sequence=8&vocabulary=50&width=16&dropout=0",
}
