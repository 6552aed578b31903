// What kernels for CUDA need of hidet's runtime. hidet's headers of these (hidet 0.6.1, hidet/runtime) include strings,
// streams and containers of the C++ library, which take longer to compile, for the device and for the host, than most
// kernels.
#ifndef HIDET_DIST_KERNELS_CUDA_RUNTIME_H
#define HIDET_DIST_KERNELS_CUDA_RUNTIME_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <exception>

#include "hidet_dist/symbols.h"

// What kernels catch and report: hidet's exceptions, which are of this class, and those of memory that is not there.
typedef std::exception HidetException;

// An exception of a kernel, or of its launch.
class KernelError : public std::exception {
 public:
  explicit KernelError(const char *message) { add(message); }
  void add(const char *text) noexcept { strncat(message_, text, sizeof(message_) - 1 - strlen(message_)); }
  const char *what() const noexcept override { return message_; }

 private:
  char message_[512] = "";
};

DLL void hidet_set_last_error(const char *message);
DLL void *get_ptr_symbol_value(const char *symbol_name);
DLL void *get_cuda_stream();
DLL void *request_cuda_workspace(size_t nbytes, bool require_clean);
void calculate_magic_numbers(int d, int &m, int &s, int &as);

// An error of a launch, which generated code makes up of pieces; it is thrown where the statement ends.
class ERRORMessage {
 public:
  ERRORMessage &operator<<(const char *text) {
    error_.add(text);
    return *this;
  }
  ~ERRORMessage() noexcept(false) { throw error_; }

 private:
  KernelError error_{""};
};

#define LOG(level) level##Message()

#endif
