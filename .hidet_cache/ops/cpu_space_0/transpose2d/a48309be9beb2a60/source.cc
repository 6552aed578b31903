#include <stdint.h>
#include <math.h>
#include <hidet/runtime/symbols.h>
#include <hidet/runtime/memory_planner.h>
#include <hidet/runtime/cpu/context.h>
#include <hidet/runtime/cpu/float32.h>
#include <hidet/runtime/logging.h>
#include <hidet/runtime/int_fastdiv.h>


static void hidet_transpose2d_compute_output_a483(float * __restrict__ input, float * __restrict__ output) {
  #pragma omp parallel for
  for (int32_t w = 0; (w < 6144); w = (w + 1)) {
    output[w] = input[(((w % 96) * 64) + (w / 96))];
  } 
}

DLL void hidet_launch_0(float * __restrict__ input, float * __restrict__ output) {
  try {
    hidet_transpose2d_compute_output_a483(input, output);
  } catch (HidetException &e) { 
    hidet_set_last_error(e.what());
    return ;
  }
}

DLL void hidet_get_input_shape(int32_t idx, int32_t * __restrict__ dims) {
  try {
    if (idx == 0) {
      dims[0] = 96;
      dims[1] = 64;
    } 
  } catch (HidetException &e) { 
    hidet_set_last_error(e.what());
    return ;
  }
}

DLL void hidet_get_output_shape(int32_t idx, int32_t * __restrict__ dims) {
  try {
    if (idx == 0) {
      dims[0] = 64;
      dims[1] = 96;
    } 
  } catch (HidetException &e) { 
    hidet_set_last_error(e.what());
    return ;
  }
}
