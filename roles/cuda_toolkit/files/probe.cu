// Proof that the toolchain is whole: cuda_fp16.h needs cccl, the main program needs the host compiler and libcudart.
// Prints the runtime's version and what became of the kernel: "no-gpu", "ok", "not-for-this-card" or "failed: why".
#include <cstdio>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

constexpr int N = 32;

__global__ void scale(__half *values, float factor) {
    values[threadIdx.x] = __float2half(__half2float(values[threadIdx.x]) * factor);
}

static const char *run() {
    __half host[N], *values = nullptr;
    for (int i = 0; i < N; i++) host[i] = __float2half(static_cast<float>(i));
    if (cudaMalloc(&values, sizeof(host)) != cudaSuccess) return "cudaMalloc";
    if (cudaMemcpy(values, host, sizeof(host), cudaMemcpyHostToDevice) != cudaSuccess) return "cudaMemcpy to the card";
    scale<<<1, N>>>(values, 2.0f);
    cudaError_t launched = cudaGetLastError();
    if (launched == cudaErrorNoKernelImageForDevice || launched == cudaErrorUnsupportedPtxVersion) return "";
    if (launched != cudaSuccess) return cudaGetErrorString(launched);
    if (cudaMemcpy(host, values, sizeof(host), cudaMemcpyDeviceToHost) != cudaSuccess) return "cudaMemcpy from the card";
    cudaFree(values);
    for (int i = 0; i < N; i++)
        if (__half2float(host[i]) != 2.0f * static_cast<float>(i)) return "wrong numbers";
    return nullptr;
}

int main() {
    int version = 0, cards = 0;
    if (cudaRuntimeGetVersion(&version) != cudaSuccess) return 1;
    std::printf("%d ", version);
    if (cudaGetDeviceCount(&cards) != cudaSuccess || cards == 0) {
        std::puts("no-gpu");
        return 0;
    }
    const char *why = run();
    if (why == nullptr) std::puts("ok");
    else if (*why == '\0') std::puts("not-for-this-card");
    else std::printf("failed: %s\n", why);
    return 0;
}
