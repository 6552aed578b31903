// Least sums of tables, and what else is done with all entries of one.
#pragma once

#include <cstdint>

namespace hidet_dist {

// Lowers the entries of `result` to the sums of strided tables over some of their dims.
//
// `shape` has `dims` sizes. Table p begins at data[p], with strides[p * dims + d] elements from one index of dim d to the
// next; a stride of 0 repeats the table. The strides of `result` are those of `result_strides`; where one is 0, the
// minimum over that dim is taken. `result` must be filled with infinity, or with other upper bounds. No entry may be NaN.
void lower_by_sums(int32_t dims, const int64_t *shape, int32_t tables, const double *const *data,
                   const int64_t *strides, const int64_t *result_strides, double *result);

// Returns the least of at least one entry, none of which is NaN.
double least_entry(const double *entries, int64_t size);

void subtract(double number, int64_t size, double *entries);

}  // namespace hidet_dist
