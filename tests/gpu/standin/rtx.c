/* What NVIDIA's plug-in asks beyond the CUDA provider, to compile for a GPU that is not there; built three times,
   with -DCUDART, -DDRIVER or -DNVML. */
#include <stddef.h>

#ifdef CUDART
int cudaDeviceGetByPCIBusId(int *device, const char *id) { *device = 0; return 0; }
int cudaHostGetDevicePointer(void **p, void *host, unsigned flags) { *p = host; return 0; }
#endif

#ifdef DRIVER
#define NOTHING(name) int name(void) { return 0; }
#define OBJECT(name) int name(void **object) { *object = (void *)1; return 0; }
NOTHING(cuInit) OBJECT(cuCtxCreate_v4) NOTHING(cuCtxDestroy_v2) OBJECT(cuCtxGetCurrent) OBJECT(cuCtxPopCurrent_v2)
NOTHING(cuCtxPushCurrent_v2) NOTHING(cuCtxSetCurrent) NOTHING(cuDestroyExternalMemory)
NOTHING(cuDestroyExternalSemaphore) NOTHING(cuExternalMemoryGetMappedBuffer) NOTHING(cuImportExternalMemory)
NOTHING(cuImportExternalSemaphore) NOTHING(cuSignalExternalSemaphoresAsync) NOTHING(cuWaitExternalSemaphoresAsync)
NOTHING(cuModuleGetFunction) NOTHING(cuModuleLoadData) NOTHING(cuModuleUnload)
int cuStreamGetCtx(void *stream, void **context) { *context = (void *)1; return 0; }
#endif

#ifdef NVML
#include <stdio.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "no error"; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { snprintf(version, size, "590.44.01"); return 0; }
#endif
