/* A stand-in for NVIDIA's driver: what libcuda.so.1 and libnvidia-ml.so.1 tell of it and of its GPUs, for `specedge doctor`.
   The environment variables are those of the stand-in CUDA. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long long env(const char *name, long long fallback) {
  const char *value = getenv(name);
  return value && *value ? atoll(value) : fallback;
}
static size_t memory(void) { return (size_t)env("STANDIN_MEMORY_MB", 80 << 10) << 20; }

#ifdef DRIVER
int cuDriverGetVersion(int *version) { *version = (int)env("STANDIN_DRIVER", 13000); return 0; }
int cuInit(unsigned flags) {
  (void)flags;
  if (getenv("STANDIN_DRIVER_CRASHES")) abort();
  return env("STANDIN_DEVICES", 1) ? (int)env("STANDIN_INIT", 0) : 100;
}
int cuGetErrorString(int error, const char **text) { *text = error == 804 ? "forward compatibility" : "other"; return 0; }
int cuDeviceGetCount(int *count) { *count = (int)env("STANDIN_DEVICES", 1); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { snprintf(name, (size_t)size, "Stand-in %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { (void)device; *size = memory(); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  int capability = (int)env("STANDIN_SM", 90);
  (void)device;
  *value = which == 75 ? capability / 10 : which == 76 ? capability % 10 : -1;
  return 0;
}
int cuDeviceGetPCIBusId(char *id, int size, int device) { snprintf(id, (size_t)size, "0000:%02x:00.0", device + 1); return 0; }
int cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return 0; }
#else
struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.95.05"); return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  *device = (void *)id;
  return strcmp(id, "0000:01:00.0") ? 6 : 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *found) {
  if (!device) return 2;
  *found = (struct memory){memory(), memory() / 4, memory() / 4 * 3};
  return 0;
}
#endif
