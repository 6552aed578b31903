#include <stdint.h>
#include <math.h>
#include <hidet/runtime/symbols.h>
#include <hidet/runtime/memory_planner.h>
#include <hidet/runtime/cpu/context.h>
#include <hidet/runtime/cpu/float32.h>
#include <hidet/runtime/logging.h>
#include <hidet/runtime/int_fastdiv.h>


static void hidet_rsubs_compute_y_4162(int32_t * __restrict__ x, int32_t * __restrict__ y) {
  #pragma omp parallel for
  for (int32_t w = 0; (w < 96); w = (w + 1)) {
    y[w] = (1 - x[w]);
  } 
}

DLL void hidet_launch_0(int32_t * __restrict__ x, int32_t * __restrict__ y) {
  try {
    hidet_rsubs_compute_y_4162(x, y);
  } catch (HidetException &e) { 
    hidet_set_last_error(e.what());
    return ;
  }
}

DLL void hidet_get_input_shape(int32_t idx, int32_t * __restrict__ dims) {
  try {
    if (idx == 0) {
      dims[0] = 8;
      dims[1] = 12;
    } 
  } catch (HidetException &e) { 
    hidet_set_last_error(e.what());
    return ;
  }
}

DLL void hidet_get_output_shape(int32_t idx, int32_t * __restrict__ dims) {
  try {
    if (idx == 0) {
      dims[0] = 8;
      dims[1] = 12;
    } 
  } catch (HidetException &e) { 
    hidet_set_last_error(e.what());
    return ;
  }
}
