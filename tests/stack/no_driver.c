/* SGLang's CUDA kernels are imported on a CPU too (they bring the CPU's), and cannot be without this symbol of a driver. Nothing
   calls it there; who does is told that there is no driver. */
int cuPointerGetAttribute(void *data, int attribute, unsigned long long pointer) {
    (void)data, (void)attribute, (void)pointer;
    return 3; /* CUDA_ERROR_NOT_INITIALIZED */
}
