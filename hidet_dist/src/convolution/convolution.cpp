// Convolutions as products by panels, whose rows are gathered run by run. See convolution.h.
#include "hidet_dist/convolution.h"

#include <algorithm>
#include <cstring>

#include "../panels/levels.hpp"

namespace {

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

  // Calls `visit(row, image, depth, height, width)` for each output of a part.
  template <class Visit>
  void for_pixels(const hidet_dist_convolution_part &part, const Visit &visit) const {
    int64_t rest = part.pixel, at[4];
    for (int dim = 3; dim > 0; --dim) {
      at[dim] = rest % v_.out[dim - 1];
      rest /= v_.out[dim - 1];
    }
    at[0] = rest;
    for (int64_t row = 0; row < part.pixels; ++row) {
      visit(row, at[0], at[1], at[2], at[3]);
      for (int dim = 3; dim > 0 && ++at[dim] == v_.out[dim - 1]; --dim) {
        at[dim] = 0;
        if (dim == 1) ++at[0];
      }
    }
  }

  void gather(const hidet_dist_convolution_part &part, const void **addresses_of, const char *zero) const {
    const char *const x = static_cast<const char *>(v_.x) + part.group * inner_ * bytes_;
    const int64_t pixel_bytes = v_.channels * bytes_;
    for_pixels(part, [&](int64_t row, int64_t image, int64_t depth, int64_t height, int64_t width) {
      const void **address = addresses_of + row;
      const int64_t d0 = depth * v_.stride[0] - v_.pad[0], h0 = height * v_.stride[1] - v_.pad[1],
                    w0 = width * v_.stride[2] - v_.pad[2];
      for (int64_t i = 0; i < v_.kernel[0]; ++i) {
        const int64_t d = d0 + i * v_.dilation[0];
        for (int64_t j = 0; j < v_.kernel[1]; ++j) {
          const int64_t h = h0 + j * v_.dilation[1];
          const bool outside = d < 0 || d >= v_.in[0] || h < 0 || h >= v_.in[1];
          const char *const line = x + ((image * v_.in[0] + d) * v_.in[1] + h) * v_.in[2] * pixel_bytes;
          for (int64_t k = 0; k < v_.kernel[2]; ++k, address += part.pixels) {
            const int64_t w = w0 + k * v_.dilation[2];
            *address = outside || w < 0 || w >= v_.in[2] ? zero : line + w * pixel_bytes;
          }
        }
      }
    });
  }

  void gather_lines(const hidet_dist_convolution_part &part, const void **addresses_of, const char *zero,
                    char *memory) const {
    const int64_t line_bytes = line_elements() * bytes_, pixel_bytes = v_.channels * bytes_;
    const int64_t before = std::min(v_.pad[2] * pixel_bytes, line_bytes);
    const int64_t inside = std::max<int64_t>(0, std::min(v_.in[2] * pixel_bytes, line_bytes - before));
    const char *current = nullptr;  // the copies for a line of outputs
    int64_t last[3] = {-1, -1, -1};
    for_pixels(part, [&](int64_t row, int64_t image, int64_t depth, int64_t height, int64_t width) {
      if (last[0] != image || last[1] != depth || last[2] != height) {
        last[0] = image;
        last[1] = depth;
        last[2] = height;
        current = memory;
        for (int64_t i = 0; i < v_.kernel[0]; ++i) {
          const int64_t d = depth * v_.stride[0] + i * v_.dilation[0] - v_.pad[0];
          for (int64_t j = 0; j < v_.kernel[1]; ++j, memory += line_bytes) {
            const int64_t h = height * v_.stride[1] + j * v_.dilation[1] - v_.pad[1];
            if (d < 0 || d >= v_.in[0] || h < 0 || h >= v_.in[1]) continue;
            std::memset(memory, 0, static_cast<size_t>(before));
            std::memcpy(
                memory + before,
                static_cast<const char *>(v_.x) + ((image * v_.in[0] + d) * v_.in[1] + h) * v_.in[2] * pixel_bytes,
                static_cast<size_t>(inside));
            std::memset(memory + before + inside, 0, static_cast<size_t>(line_bytes - before - inside));
          }
        }
      }
      const void **address = addresses_of + row;
      const char *line = current + width * v_.stride[2] * pixel_bytes;
      for (int64_t i = 0; i < v_.kernel[0]; ++i) {
        const int64_t d = depth * v_.stride[0] + i * v_.dilation[0] - v_.pad[0];
        for (int64_t j = 0; j < v_.kernel[1]; ++j, line += line_bytes, address += part.pixels) {
          const int64_t h = height * v_.stride[1] + j * v_.dilation[1] - v_.pad[1];
          *address = d < 0 || d >= v_.in[0] || h < 0 || h >= v_.in[1] ? zero : line;
        }
      }
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
  return found->multiply(product);
}
