#!/usr/bin/env bash
# Serves /models/dense 8b with vLLM 0.27.0: 2 x prefill on 2 h200_sxm and 1 x decode on 8 h200_sxm.
# Written by fpmsdk VERSION from the configuration of a prediction.
# Needs one machine with 12 GPUs. Workers listen on port 8000 and the following ones.
# Put a router for disaggregated prefill in front of them; it is not started here.
set -euo pipefail
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

# Worker 0, prefill: 2 h200_sxm (tensor 2)
CUDA_VISIBLE_DEVICES=0,1 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 \
  vllm serve '/models/dense 8b' \
    --port 8000 \
    --tensor-parallel-size 2 \
    --pipeline-parallel-size 1 \
    --data-parallel-size 1 \
    --max-num-batched-tokens 8192 \
    --max-num-seqs 4 \
    --max-model-len 4096 \
    --block-size 64 \
    --gpu-memory-utilization 0.9 \
    --enable-prefix-caching \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &

# Worker 1, prefill: 2 h200_sxm (tensor 2)
CUDA_VISIBLE_DEVICES=2,3 VLLM_NIXL_SIDE_CHANNEL_PORT=5664 \
  vllm serve '/models/dense 8b' \
    --port 8001 \
    --tensor-parallel-size 2 \
    --pipeline-parallel-size 1 \
    --data-parallel-size 1 \
    --max-num-batched-tokens 8192 \
    --max-num-seqs 4 \
    --max-model-len 4096 \
    --block-size 64 \
    --gpu-memory-utilization 0.9 \
    --enable-prefix-caching \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' &

# Worker 2, decode: 8 h200_sxm (tensor 8)
CUDA_VISIBLE_DEVICES=4,5,6,7,8,9,10,11 VLLM_NIXL_SIDE_CHANNEL_PORT=5728 \
  vllm serve '/models/dense 8b' \
    --port 8002 \
    --tensor-parallel-size 8 \
    --pipeline-parallel-size 1 \
    --data-parallel-size 1 \
    --max-num-batched-tokens 8192 \
    --max-num-seqs 256 \
    --max-model-len 4096 \
    --block-size 16 \
    --num-gpu-blocks-override 38146 \
    --enable-prefix-caching \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' &

wait -n
exit $?
