// What kernels need of hidet's runtime. hidet's headers of these (hidet 0.6.1, hidet/runtime) include strings and streams
// of the C++ library, which take longer to compile, precompiled too, than most kernels.
#ifndef HIDET_DIST_KERNELS_RUNTIME_H
#define HIDET_DIST_KERNELS_RUNTIME_H

#include <assert.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include <exception>

#include "hidet_dist/symbols.h"

// What kernels catch and report: hidet's exceptions, which are of this class, and those of memory that is not there.
typedef std::exception HidetException;

// An exception of a kernel.
class KernelError : public std::exception {
 public:
  explicit KernelError(const char *message) : message_(message) {}
  const char *what() const noexcept override { return message_; }

 private:
  const char *message_;  // a literal
};

DLL void hidet_set_last_error(const char *message);
DLL void *get_ptr_symbol_value(const char *symbol_name);
DLL void *request_cpu_workspace(size_t nbytes, bool require_clean);
void calculate_magic_numbers(int d, int &m, int &s, int &as);

static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

#endif
