/* A stand-in for libcuda.so and libnvidia-ml.so in Servelab's lab: no GPU is behind it, and it says so.
   It lets programs link and lets a version check find what it looks for; every attempt to use a GPU fails. */
const char servelab_double[] = "Servelab lab double, not NVIDIA's library: simulated driver " SERVELAB_VERSION;

int cuInit(unsigned flags) { (void)flags; return 100; /* CUDA_ERROR_NO_DEVICE */ }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int nvmlInit_v2(void) { return 9; /* NVML_ERROR_DRIVER_NOT_LOADED */ }
