// Proof that the toolchain is whole: cuda_fp16.h needs cccl, the main program needs the host compiler and libcudart.
#include <cstdio>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

__global__ void scale(__half *values, float factor) {
    values[threadIdx.x] = __float2half(__half2float(values[threadIdx.x]) * factor);
}

int main() {
    int version = 0;
    __half *values = nullptr;
    if (cudaRuntimeGetVersion(&version) != cudaSuccess) return 1;
    if (cudaMalloc(&values, 32 * sizeof(__half)) == cudaSuccess) {
        scale<<<1, 32>>>(values, 2.0f);
        cudaFree(values);
    }
    std::printf("%d\n", version);
    return 0;
}
