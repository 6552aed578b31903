// Convolutions as products by panels, whose rows are gathered run by run. See convolution.h.
#include "hidet_dist/convolution.h"

#include <algorithm>
#include <cstring>

#include "../panels/levels.hpp"
#include "hidet_dist/kernels/lines.h"

namespace {

using hidet_dist::kernels::for_lines;
using hidet_dist::kernels::Line;

constexpr int64_t kAlignment = 64;
// Kernels of inputs with fewer channels are gathered a line at a time: the runs of single taps would be too short.
constexpr int64_t kFewChannels = 16;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t dtype_bytes(int32_t dtype) { return dtype == HIDET_DIST_F32 ? 4 : 2; }

// The parts of a convolution that is computed as a product.
class Gathered {
 public:
  explicit Gathered(const hidet_dist_convolution &v)
      : v_(v), bytes_(dtype_bytes(v.x_dtype)), inner_(v.channels / v.groups) {}

  // Whether rows of the product lie in the input one after the other.
  bool in_place() const {
    for (int dim = 0; dim < 3; ++dim) {
      if (v_.kernel[dim] != 1 || v_.stride[dim] != 1 || v_.pad[dim] != 0 || v_.in[dim] != v_.out[dim]) return false;
    }
    return true;
  }

  // Whether a run has the taps of a whole line of the kernel, read from lines of the input that are copied with their
  // padding.
  bool by_line() const {
    return v_.groups == 1 && v_.dilation[2] == 1 && v_.kernel[2] > 1 && v_.channels < kFewChannels;
  }

  int64_t run() const { return by_line() ? inner_ * v_.kernel[2] : inner_; }
  int64_t taps() const { return v_.kernel[0] * v_.kernel[1] * v_.kernel[2]; }
  int64_t runs() const { return by_line() ? v_.kernel[0] * v_.kernel[1] : taps(); }

  // Bytes of scratch memory for the addresses of runs, for zeros, and for lines of the input.
  int64_t addresses(int64_t pixels) const {
    return in_place() ? 0 : aligned(runs() * pixels * static_cast<int64_t>(sizeof(void *)));
  }
  int64_t zeros() const { return in_place() ? 0 : aligned((run() + 16) * bytes_); }
  int64_t lines(int64_t pixels) const {
    if (!by_line() || in_place()) return 0;
    // Each line of outputs that the pixels touch reads so many lines of the input, at most.
    const int64_t touched = (pixels - 1 + v_.out[2] - 1) / v_.out[2] + 1;
    return aligned((touched * v_.kernel[0] * v_.kernel[1] * line_elements() + 16) * bytes_);
  }

  void run_part(int32_t level, const hidet_dist_convolution_part &part, hidet_dist_panel_product *product) const {
    char *memory = static_cast<char *>(part.scratch);
    product->rows = part.pixels;
    product->depth = taps() * inner_;
    product->scratch = memory;
    memory += aligned(hidet_dist_panels_scratch(level));
    const char *const x = static_cast<const char *>(v_.x);
    if (in_place()) {
      product->left = x + (part.pixel * v_.channels + part.group * inner_) * bytes_;
      product->row_step = v_.channels;
      product->depth_step = 1;
      return;
    }
    auto *const addresses_of = reinterpret_cast<const void **>(memory);
    memory += addresses(part.pixels);
    char *const zero = memory;
    std::memset(zero, 0, static_cast<size_t>(zeros()));
    memory += zeros();
    product->runs = addresses_of;
    product->run = run();
    if (by_line()) {
      gather_lines(part, addresses_of, zero, memory);
    } else {
      gather(part, addresses_of, zero);
    }
  }

 private:
  int64_t line_elements() const { return ((v_.out[2] - 1) * v_.stride[2] + v_.kernel[2]) * v_.channels; }

  // Whether a tap of the outer dims reads from within the input.
  bool has(int64_t depth, int64_t height) const {
    return depth >= 0 && depth < v_.in[0] && height >= 0 && height < v_.in[1];
  }

  // A line of the input.
  const char *line_of(int64_t image, int64_t depth, int64_t height) const {
    return static_cast<const char *>(v_.x) +
           ((image * v_.in[0] + depth) * v_.in[1] + height) * v_.in[2] * v_.channels * bytes_;
  }

  // Calls `visit(tap, depth, height)` for the taps of the outer dims, with the line of the input that a line of outputs
  // reads there.
  template <class Visit>
  void for_taps(const Line &line, const Visit &visit) const {
    for (int64_t i = 0; i < v_.kernel[0]; ++i) {
      const int64_t depth = line.depth * v_.stride[0] + i * v_.dilation[0] - v_.pad[0];
      for (int64_t j = 0; j < v_.kernel[1]; ++j) {
        visit(i * v_.kernel[1] + j, depth, line.height * v_.stride[1] + j * v_.dilation[1] - v_.pad[1]);
      }
    }
  }

  void gather(const hidet_dist_convolution_part &part, const void **addresses_of, const char *zero) const {
    const int64_t pixel_bytes = v_.channels * bytes_, first = part.group * inner_ * bytes_;
    for_lines(v_, part.pixel, part.pixel + part.pixels, [&](const Line &line, int64_t place) {
      for_taps(line, [&](int64_t tap, int64_t depth, int64_t height) {
        const bool inside = has(depth, height);
        const char *const x = inside ? line_of(line.image, depth, height) + first : nullptr;
        for (int64_t k = 0; k < v_.kernel[2]; ++k) {
          const void **const address = addresses_of + (tap * v_.kernel[2] + k) * part.pixels + place;
          const int64_t offset = k * v_.dilation[2] - v_.pad[2];
          for (int64_t width = line.begin; width < line.end; ++width) {
            const int64_t w = width * v_.stride[2] + offset;
            address[width - line.begin] = !inside || w < 0 || w >= v_.in[2] ? zero : x + w * pixel_bytes;
          }
        }
      });
    });
  }

  void gather_lines(const hidet_dist_convolution_part &part, const void **addresses_of, const char *zero,
                    char *memory) const {
    const int64_t line_bytes = line_elements() * bytes_, pixel_bytes = v_.channels * bytes_;
    const int64_t before = std::min(v_.pad[2] * pixel_bytes, line_bytes);
    const int64_t inside = std::max<int64_t>(0, std::min(v_.in[2] * pixel_bytes, line_bytes - before));
    for_lines(v_, part.pixel, part.pixel + part.pixels, [&](const Line &line, int64_t place) {
      for_taps(line, [&](int64_t tap, int64_t depth, int64_t height) {
        const bool is_read = has(depth, height);
        if (is_read) {
          std::memset(memory, 0, static_cast<size_t>(before));
          std::memcpy(memory + before, line_of(line.image, depth, height), static_cast<size_t>(inside));
          std::memset(memory + before + inside, 0, static_cast<size_t>(line_bytes - before - inside));
        }
        const void **const address = addresses_of + tap * part.pixels + place;
        for (int64_t width = line.begin; width < line.end; ++width) {
          address[width - line.begin] = is_read ? memory + width * v_.stride[2] * pixel_bytes : zero;
        }
        memory += line_bytes;
      });
    });
  }

  const hidet_dist_convolution &v_;
  const int64_t bytes_;
  const int64_t inner_;  // channels of a group
};

}  // namespace

extern "C" int32_t hidet_dist_is_depthwise(const hidet_dist_convolution *v) {
  return v->groups > 1 && v->groups == v->channels && v->groups == v->out_channels ? 1 : 0;
}

extern "C" int64_t hidet_dist_convolution_scratch(int32_t level, const hidet_dist_convolution *v, int64_t pixels) {
  const int64_t panels = hidet_dist_panels_scratch(level);
  if (v == nullptr || panels == 0 || hidet_dist_is_depthwise(v)) return panels == 0 ? 0 : kAlignment;
  const Gathered gathered(*v);
  return aligned(panels) + gathered.addresses(pixels) + gathered.zeros() + gathered.lines(pixels);
}

extern "C" int32_t hidet_dist_convolve(int32_t level, const hidet_dist_convolution *v,
                                       const hidet_dist_convolution_part *part) {
  const auto *const found = hidet_dist::panels::level_of(level);
  if (found == nullptr || v == nullptr || part == nullptr) return HIDET_DIST_INVALID_ARGUMENT;
  if (hidet_dist_is_depthwise(v)) return found->convolve_depthwise(*v, *part);
  const Gathered gathered(*v);
  hidet_dist_panel_product product = {};
  gathered.run_part(level, *part, &product);
  product.columns = part->channels;
  const int64_t outer = v->out_channels / v->groups;
  product.right = static_cast<const char *>(v->filters) +
                  (part->group * outer + part->channel) * product.depth * dtype_bytes(v->filters_dtype);
  product.layout = HIDET_DIST_IN_PANELS;
  product.left_dtype = v->x_dtype;
  product.right_dtype = v->filters_dtype;
  product.result = part->result;
  product.result_step = part->result_step;
  return hidet_dist::panels::multiply_at(level, product);
}
