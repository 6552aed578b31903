#include "hidet_dist/labels.h"

#include <vector>

int64_t hidet_dist_undominated(int64_t count, int64_t columns, const int64_t *group, const double *values,
                               int64_t comparisons, uint8_t *keep) {
  // The lines of the group that are kept, without the first column: in lexicographic order it undercuts already.
  const int64_t rest = columns - 1;
  std::vector<double> front;
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i == 0 || group[i] != group[i - 1]) {
      front.clear();
      kept = 0;
    }
    const double *line = values + i * columns + 1;
    bool dominated = false;
    int64_t compared = 0;
    // Neighbours in lexicographic order are the likeliest to dominate.
    for (const double *other = front.data() + kept * rest; compared < kept && !dominated; ++compared) {
      other -= rest;
      int64_t column = 0;
      while (column < rest && other[column] <= line[column]) ++column;
      dominated = column == rest;
    }
    comparisons -= compared;
    if (comparisons < 0) return -1;
    keep[i] = dominated ? 0 : 1;
    if (!dominated) {
      front.insert(front.end(), line, line + rest);
      ++kept;
    }
  }
  return comparisons;
}
