/* The outputs of a convolution, line by line. */
#ifndef HIDET_DIST_KERNELS_LINES_H
#define HIDET_DIST_KERNELS_LINES_H

#include <cstdint>

namespace hidet_dist {
namespace kernels {

/* A run of outputs of one image along the last dim. */
struct Line {
  int64_t image, depth, height, begin, end;
};

/*
 * Calls `visit(line, place)` for the lines of the outputs `first` to `last` of all images, counted on; `place` is how
 * many outputs were before the line. `Convolution` has the sizes of three spatial dims, `out`.
 */
template <class Convolution, class Visit>
inline void for_lines(const Convolution &v, int64_t first, int64_t last, const Visit &visit) {
  int64_t output = first, rest = first;
  Line line;
  line.begin = rest % v.out[2];
  rest /= v.out[2];
  line.height = rest % v.out[1];
  rest /= v.out[1];
  line.depth = rest % v.out[0];
  line.image = rest / v.out[0];
  while (output < last) {
    const int64_t end = line.begin + (last - output);
    line.end = end < v.out[2] ? end : v.out[2];
    visit(line, output - first);
    output += line.end - line.begin;
    line.begin = 0;
    if (++line.height == v.out[1]) {
      line.height = 0;
      if (++line.depth == v.out[0]) {
        line.depth = 0;
        ++line.image;
      }
    }
  }
}

}  // namespace kernels
}  // namespace hidet_dist

#endif
