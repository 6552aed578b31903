// Makes a kernel of the host behave like one of a device: it returns at once, and runs in its turn on the stream that
// hidet's runtime says, also when a graph with it is launched. What is compiled serves all kernels: the path of the
// kernel's own library is written over kLibrary.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

extern "C" void *get_cuda_stream();
extern "C" int cuLaunchHostFunc(void *stream, void (*function)(void *), void *data);

namespace {

// More parameters than any kernel has; all are pointers. Those that a kernel does not have are not read by it.
constexpr int kMost = 16;
using Kernel = void (*)(void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *,
                        void *, void *, void *, void *);

volatile const char kLibrary[1024] = "@LIBRARY@";

struct Launch {
  Kernel kernel;
  void *given[kMost];
};

Kernel load() {
  void *library = dlopen(const_cast<const char *>(kLibrary), RTLD_NOW | RTLD_LOCAL);
  auto *kernel = library == nullptr ? nullptr : reinterpret_cast<Kernel>(dlsym(library, "hidet_launch_0"));
  if (kernel == nullptr) {
    std::fprintf(stderr, "the stand-in of a kernel: %s\n", dlerror());
    std::abort();
  }
  return kernel;
}

void run(void *data) {
  auto *launch = static_cast<Launch *>(data);  // kept: a graph runs it again
  void **x = launch->given;
  launch->kernel(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]);
}

}  // namespace

extern "C" void hidet_launch_0(void *x0, void *x1, void *x2, void *x3, void *x4, void *x5, void *x6, void *x7, void *x8,
                               void *x9, void *x10, void *x11, void *x12, void *x13, void *x14, void *x15) {
  static const Kernel kernel = load();
  auto *launch = new Launch{kernel, {x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15}};
  cuLaunchHostFunc(get_cuda_stream(), run, launch);
}
