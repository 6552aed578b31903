#include "hidet_dist/labels.h"

#include <cstddef>
#include <vector>

int32_t hidet_dist_undominated(int64_t count, int64_t columns, const int64_t *group, const double *values,
                               int64_t comparisons, uint8_t *keep) {
  std::vector<const double *> front;
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || group[i] != group[i - 1]) front.clear();
    const double *line = values + i * columns;
    bool dominated = false;
    // Neighbours in lexicographic order are the likeliest to dominate.
    for (std::size_t n = front.size(); n > 0 && !dominated; --n) {
      const double *other = front[n - 1];
      int64_t column = 0;
      while (column < columns && other[column] <= line[column]) ++column;
      dominated = column == columns;
      if (--comparisons < 0) return 1;
    }
    keep[i] = dominated ? 0 : 1;
    if (!dominated) front.push_back(line);
  }
  return 0;
}
