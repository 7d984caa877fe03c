// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "bridge/cuda_api.h"
#include "bridge/cuda_call.h"

using hipsim::api;
using hipsim::as_device_pointer;
using hipsim::as_pointer;
using hipsim::as_stream;
using hipsim::Call;
using hipsim::Caller;
using hipsim::CopyKind;
using hipsim::Error;
using hipsim::Needs;
using hipsim::needs_of;
using hipsim::Pitch;
using hipsim::PitchedCopy;
using hipsim::Runtime;
using hipsim::Shape;

namespace {

template <auto cuda, auto engine>
constexpr bool same = static_cast<unsigned>(cuda) == static_cast<unsigned>(engine);

// Orders and flags go to the engine as they are.
static_assert(same<CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, hipsim::kSourceAccessStream>);
static_assert(same<CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL,
                   hipsim::kSourceAccessDuringApiCall>);
static_assert(same<CU_MEMCPY_SRC_ACCESS_ORDER_ANY, hipsim::kSourceAccessAny>);
static_assert(
    same<CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, hipsim::kCopyPreferOverlap>);

CUresult copy(Call call, CUdeviceptr destination, CUdeviceptr source, size_t bytes,
              CopyKind kind, CUstream stream, bool blocking) {
  return api(needs_of(stream), call, [=](Runtime& rt, const Caller& caller) {
    return rt.copy(caller, as_pointer(destination), as_pointer(source), bytes, kind,
                   as_stream(stream), blocking);
  });
}

// --- planes and boxes --------------------------------------------------------------

// One side of a copy, as both structs have it.
struct Box {
  CUmemorytype type;
  const void* host;
  CUdeviceptr device;
  size_t pitch;
  size_t rows;  // of a slice
  size_t x, y, z;

  std::optional<uintptr_t> first_byte() const {
    const uintptr_t base =
        type == CU_MEMORYTYPE_HOST ? reinterpret_cast<uintptr_t>(host) : device;
    return hipsim::box_address(base, pitch, rows, x, y, z);
  }
};

// Do the rows and the slices that the copy takes part of have room for it?
Error check_box(const Box& box, const Shape& shape) {
  if (box.type == CU_MEMORYTYPE_ARRAY) return Error::kNotSupported;
  if (box.type != CU_MEMORYTYPE_HOST && box.type != CU_MEMORYTYPE_DEVICE &&
      box.type != CU_MEMORYTYPE_UNIFIED) {
    return Error::kInvalidValue;
  }
  const auto fits = [](size_t begin, size_t count, size_t room) {
    return begin <= room && count <= room - begin;
  };
  const bool sound = fits(box.x, shape.width, box.pitch) &&
                     fits(box.y, shape.height, box.rows) && box.first_byte();
  return sound ? Error::kSuccess : Error::kInvalidValue;
}

// Pageable memory is not a device's. Which kind of memory the host's is matters little.
CopyKind kind_of(const Box& to, const Box& from) {
  const bool to_device = to.type == CU_MEMORYTYPE_DEVICE;
  const bool from_device = from.type == CU_MEMORYTYPE_DEVICE;
  if (to_device && from_device) return CopyKind::kDeviceToDevice;
  if (to_device) return CopyKind::kHostToDevice;
  return from_device ? CopyKind::kDeviceToHost : CopyKind::kDefault;
}

// A pitch of zero is that of rows without a gap, and rows of zero the copy's own.
void fill_in(Box* box, const Shape& shape) {
  if (box->pitch == 0) box->pitch = box->x + shape.width;
  if (box->rows == 0) box->rows = box->y + shape.height;
}

CUresult copy_boxes(Call call, Box to, Box from, const Shape& shape, CUstream stream,
                    bool blocking) {
  return api(needs_of(stream), call, [&](Runtime& rt, const Caller& caller) {
    fill_in(&to, shape);
    fill_in(&from, shape);
    for (const Box* box : {&to, &from}) {
      const Error error = check_box(*box, shape);
      if (error != Error::kSuccess) return error;
    }
    const PitchedCopy copy{as_pointer(*to.first_byte()),
                           {to.pitch, to.pitch * to.rows},
                           as_pointer(*from.first_byte()),
                           {from.pitch, from.pitch * from.rows},
                           shape};
    return rt.copy_pitched(caller, copy, kind_of(to, from), as_stream(stream),
                           blocking);
  });
}

CUresult refuse(Call call) {
  return api(call, [](Runtime&, const Caller&) { return Error::kInvalidValue; });
}

CUresult copy_plane(Call call, const CUDA_MEMCPY2D* copy, CUstream stream,
                    bool blocking) {
  if (copy == nullptr) return refuse(call);
  const Box to{copy->dstMemoryType,
               copy->dstHost,
               copy->dstDevice,
               copy->dstPitch,
               0,
               copy->dstXInBytes,
               copy->dstY,
               0};
  const Box from{copy->srcMemoryType,
                 copy->srcHost,
                 copy->srcDevice,
                 copy->srcPitch,
                 0,
                 copy->srcXInBytes,
                 copy->srcY,
                 0};
  return copy_boxes(call, to, from, {copy->WidthInBytes, copy->Height}, stream,
                    blocking);
}

// --- batches -----------------------------------------------------------------------

CUresult copy_batch(Call call, CUdeviceptr* destinations, CUdeviceptr* sources,
                    size_t* sizes, size_t count, const CUmemcpyAttributes* attributes,
                    const size_t* first_copies, size_t attribute_count,
                    size_t* fail_index, CUstream stream) {
  static_assert(sizeof(CUdeviceptr) == sizeof(void*));
  hipsim::Batch batch{reinterpret_cast<void* const*>(destinations),
                      reinterpret_cast<const void* const*>(sources),
                      sizes,
                      count,
                      {},
                      first_copies,
                      attribute_count,
                      fail_index};
  const Needs needs = as_stream(stream) == 0 ? Needs::kNothing : Needs::kWork;
  return api(
      needs, call,
      [&](Runtime& rt, const Caller& caller) {
        // What other calls have a number of its own for.
        if (hipsim::check_needs(Needs::kContext) != Error::kSuccess) {
          return Error::kInvalidValue;
        }
        if (attributes != nullptr && attribute_count <= count) {
          std::for_each_n(attributes, attribute_count, [&](const auto& each) {
            batch.attributes.push_back({each.srcAccessOrder, each.flags});
          });
        }
        return rt.copy_batch(caller, batch, as_stream(stream));
      },
      [&](Runtime& rt) { rt.blame_first_copy(batch); });
}

}  // namespace

// --- fills -------------------------------------------------------------------------

CUresult cuMemsetD8_v2(CUdeviceptr destination, unsigned char value, size_t bytes) {
  return api(Call::cuMemsetD8_v2, [=](Runtime& rt, const Caller& caller) {
    return rt.fill(caller, as_pointer(destination), value, bytes, 0, true);
  });
}

CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value, size_t bytes,
                         CUstream stream) {
  return api(needs_of(stream), Call::cuMemsetD8Async,
             [=](Runtime& rt, const Caller& caller) {
               return rt.fill(caller, as_pointer(destination), value, bytes,
                              as_stream(stream), false);
             });
}

// --- copies ------------------------------------------------------------------------

CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source, size_t bytes) {
  return copy(Call::cuMemcpy, destination, source, bytes, CopyKind::kDefault, nullptr,
              true);
}

CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source, size_t bytes,
                       CUstream stream) {
  return copy(Call::cuMemcpyAsync, destination, source, bytes, CopyKind::kDefault,
              stream, false);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr destination, const void* source, size_t bytes) {
  return copy(Call::cuMemcpyHtoD_v2, destination, as_device_pointer(source), bytes,
              CopyKind::kHostToDevice, nullptr, true);
}

CUresult cuMemcpyDtoH_v2(void* destination, CUdeviceptr source, size_t bytes) {
  return copy(Call::cuMemcpyDtoH_v2, as_device_pointer(destination), source, bytes,
              CopyKind::kDeviceToHost, nullptr, true);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void* source, size_t bytes,
                              CUstream stream) {
  return copy(Call::cuMemcpyHtoDAsync_v2, destination, as_device_pointer(source), bytes,
              CopyKind::kHostToDevice, stream, false);
}

CUresult cuMemcpyDtoHAsync_v2(void* destination, CUdeviceptr source, size_t bytes,
                              CUstream stream) {
  return copy(Call::cuMemcpyDtoHAsync_v2, as_device_pointer(destination), source, bytes,
              CopyKind::kDeviceToHost, stream, false);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source, size_t bytes,
                              CUstream stream) {
  return copy(Call::cuMemcpyDtoDAsync_v2, destination, source, bytes,
              CopyKind::kDeviceToDevice, stream, false);
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* copy) {
  return copy_plane(Call::cuMemcpy2D_v2, copy, nullptr, true);
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream) {
  return copy_plane(Call::cuMemcpy2DAsync_v2, copy, stream, false);
}

CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* copy, CUstream stream) {
  if (copy == nullptr) return refuse(Call::cuMemcpy3DAsync_v2);
  const Box to{copy->dstMemoryType, copy->dstHost,     copy->dstDevice, copy->dstPitch,
               copy->dstHeight,     copy->dstXInBytes, copy->dstY,      copy->dstZ};
  const Box from{copy->srcMemoryType, copy->srcHost,   copy->srcDevice,
                 copy->srcPitch,      copy->srcHeight, copy->srcXInBytes,
                 copy->srcY,          copy->srcZ};
  return copy_boxes(Call::cuMemcpy3DAsync_v2, to, from,
                    {copy->WidthInBytes, copy->Height, copy->Depth}, stream, false);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* destinations, CUdeviceptr* sources,
                            size_t* sizes, size_t count, CUmemcpyAttributes* attributes,
                            size_t* first_copies, size_t attribute_count,
                            size_t* fail_index, CUstream stream) {
  return copy_batch(Call::cuMemcpyBatchAsync, destinations, sources, sizes, count,
                    attributes, first_copies, attribute_count, fail_index, stream);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* destinations, CUdeviceptr* sources,
                               size_t* sizes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* first_copies,
                               size_t attribute_count, CUstream stream) {
  return copy_batch(Call::cuMemcpyBatchAsync_v2, destinations, sources, sizes, count,
                    attributes, first_copies, attribute_count, nullptr, stream);
}
