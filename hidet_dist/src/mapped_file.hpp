// A watched file; see mapped_file.h.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "hidet_dist/mapped_file.h"

struct hidet_dist_mapped_file {
 public:
  // As hidet_dist_mapped_file_change; `explained` says whether a change of status shows in more than its time.
  int32_t change(bool *explained = nullptr) const;

  // Whether data that depends on the file must not be sent.
  bool changed() const;

  // Read by the signal handler: these are atomic, and this object is never freed, only reused.
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};  // 0 where nothing is watched
  std::atomic<bool> lost{false};  // a page could not be read
  hidet_dist_mapped_file *next = nullptr;

  int descriptor = -1;
  struct stat before{};
  std::string name;
};
