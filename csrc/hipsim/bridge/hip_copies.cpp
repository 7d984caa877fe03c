// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "bridge/hip_api.h"
#include "bridge/hip_call.h"

using hipsim::api;
using hipsim::as_handle;
using hipsim::as_stream;
using hipsim::Call;
using hipsim::Caller;
using hipsim::CopyKind;
using hipsim::Error;
using hipsim::Pitch;
using hipsim::PitchedCopy;
using hipsim::Runtime;
using hipsim::Shape;

namespace {

template <auto hip, auto engine>
constexpr bool same = static_cast<unsigned>(hip) == static_cast<unsigned>(engine);

// Kinds, orders and flags go to the engine as they are.
static_assert(same<hipMemcpyHostToHost, CopyKind::kHostToHost>);
static_assert(same<hipMemcpyHostToDevice, CopyKind::kHostToDevice>);
static_assert(same<hipMemcpyDeviceToHost, CopyKind::kDeviceToHost>);
static_assert(same<hipMemcpyDeviceToDevice, CopyKind::kDeviceToDevice>);
static_assert(same<hipMemcpyDefault, CopyKind::kDefault>);
static_assert(same<hipMemcpyDeviceToDeviceNoCU, CopyKind::kDeviceToDeviceNoCu>);
static_assert(same<hipMemcpySrcAccessOrderStream, hipsim::kSourceAccessStream>);
static_assert(
    same<hipMemcpySrcAccessOrderDuringApiCall, hipsim::kSourceAccessDuringApiCall>);
static_assert(same<hipMemcpySrcAccessOrderAny, hipsim::kSourceAccessAny>);
static_assert(same<hipMemcpyFlagExtPreferCE, hipsim::kCopyPreferSdma>);
static_assert(same<hipMemcpyFlagExtOpSwap, hipsim::kCopySwap>);
static_assert(same<hipMemcpyFlagExtOpIndirectSrc, hipsim::kCopyIndirectSource>);
static_assert(same<hipMemcpyFlagExtOpIndirectDst, hipsim::kCopyIndirectDestination>);

hipError_t copy(Call call, void* destination, const void* source, size_t bytes,
                hipMemcpyKind kind, hipStream_t stream, bool blocking) {
  return api(call, [=](Runtime& rt, const Caller& caller) {
    return rt.copy(caller, destination, source, bytes, static_cast<CopyKind>(kind),
                   as_stream(stream), blocking);
  });
}

hipError_t copy_plane(Call call, const PitchedCopy& plane, hipMemcpyKind kind,
                      hipStream_t stream, bool blocking) {
  return api(call, [&](Runtime& rt, const Caller& caller) {
    return rt.copy_pitched(caller, plane, static_cast<CopyKind>(kind),
                           as_stream(stream), blocking);
  });
}

// --- boxes -------------------------------------------------------------------------

bool names_one_memory(hipArray_t array, const hipPitchedPtr& pointer) {
  return (array == nullptr) != (pointer.ptr == nullptr);
}

// Does the row that the copy takes part of have room for it?
bool row_holds(const hipPitchedPtr& pointer, const hipPos& position, size_t width) {
  return pointer.pitch == 0 ||
         (position.x <= pointer.pitch && width <= pointer.pitch - position.x);
}

struct Corner {
  void* first_byte;
  Pitch pitch;
};

// What is not given of a distance is the copy's own.
std::optional<Corner> corner_of(const hipPitchedPtr& pointer, const hipPos& position,
                                const Shape& shape) {
  const std::optional<uintptr_t> address =
      hipsim::box_address(as_handle(pointer.ptr), pointer.pitch, pointer.ysize,
                          position.x, position.y, position.z);
  Pitch pitch{pointer.pitch != 0 ? pointer.pitch : shape.width, 0};
  const size_t rows = pointer.ysize != 0 ? pointer.ysize : shape.height;
  if (!address || __builtin_mul_overflow(pitch.row, rows, &pitch.slice)) {
    return std::nullopt;
  }
  return Corner{reinterpret_cast<void*>(*address), pitch};
}

// Arrays are textures' memory, of which the simulator has none.
Error check_box(const hipMemcpy3DParms& box) {
  if (!names_one_memory(box.srcArray, box.srcPtr) ||
      !names_one_memory(box.dstArray, box.dstPtr)) {
    return Error::kInvalidValue;
  }
  if (box.srcArray != nullptr || box.dstArray != nullptr) return Error::kNotSupported;
  if (box.srcPtr.pitch < box.srcPtr.xsize || box.dstPtr.pitch < box.dstPtr.xsize) {
    return Error::kInvalidPitch;
  }
  if (std::max(box.srcPtr.pitch, box.dstPtr.pitch) >= hipsim::kMaxPitch) {
    return Error::kInvalidValue;
  }
  const bool fits = row_holds(box.srcPtr, box.srcPos, box.extent.width) &&
                    row_holds(box.dstPtr, box.dstPos, box.extent.width);
  return fits ? Error::kSuccess : Error::kInvalidValue;
}

hipError_t copy_box(Call call, const hipMemcpy3DParms* box, hipStream_t stream,
                    bool blocking) {
  return api(call, [=](Runtime& rt, const Caller& caller) {
    if (box == nullptr) return Error::kInvalidValue;
    if (const Error error = check_box(*box); error != Error::kSuccess) return error;
    const Shape shape{box->extent.width, box->extent.height, box->extent.depth};
    const std::optional<Corner> to = corner_of(box->dstPtr, box->dstPos, shape);
    const std::optional<Corner> from = corner_of(box->srcPtr, box->srcPos, shape);
    if (!to || !from) return Error::kInvalidValue;
    const PitchedCopy copy{to->first_byte, to->pitch, from->first_byte, from->pitch,
                           shape};
    return rt.copy_pitched(caller, copy, static_cast<CopyKind>(box->kind),
                           as_stream(stream), blocking);
  });
}

}  // namespace

// --- fills -------------------------------------------------------------------------

hipError_t hipMemset(void* destination, int value, size_t bytes) {
  return api(Call::hipMemset, [=](Runtime& rt, const Caller& caller) {
    return rt.fill(caller, destination, value, bytes, 0, true);
  });
}

hipError_t hipMemsetAsync(void* destination, int value, size_t bytes,
                          hipStream_t stream) {
  return api(Call::hipMemsetAsync, [=](Runtime& rt, const Caller& caller) {
    return rt.fill(caller, destination, value, bytes, as_stream(stream), false);
  });
}

// --- copies ------------------------------------------------------------------------

hipError_t hipMemcpy(void* destination, const void* source, size_t bytes,
                     hipMemcpyKind kind) {
  return copy(Call::hipMemcpy, destination, source, bytes, kind, nullptr, true);
}

hipError_t hipMemcpyAsync(void* destination, const void* source, size_t bytes,
                          hipMemcpyKind kind, hipStream_t stream) {
  return copy(Call::hipMemcpyAsync, destination, source, bytes, kind, stream, false);
}

hipError_t hipMemcpy2D(void* destination, size_t destination_pitch, const void* source,
                       size_t source_pitch, size_t width, size_t height,
                       hipMemcpyKind kind) {
  return copy_plane(
      Call::hipMemcpy2D,
      {destination, {destination_pitch, 0}, source, {source_pitch, 0}, {width, height}},
      kind, nullptr, true);
}

hipError_t hipMemcpy2DAsync(void* destination, size_t destination_pitch,
                            const void* source, size_t source_pitch, size_t width,
                            size_t height, hipMemcpyKind kind, hipStream_t stream) {
  return copy_plane(
      Call::hipMemcpy2DAsync,
      {destination, {destination_pitch, 0}, source, {source_pitch, 0}, {width, height}},
      kind, stream, false);
}

hipError_t hipMemcpy3D(const hipMemcpy3DParms* parameters) {
  return copy_box(Call::hipMemcpy3D, parameters, nullptr, true);
}

hipError_t hipMemcpy3DAsync(const hipMemcpy3DParms* parameters, hipStream_t stream) {
  return copy_box(Call::hipMemcpy3DAsync, parameters, stream, false);
}

hipError_t hipMemcpyBatchAsync(void** destinations, void** sources, size_t* sizes,
                               size_t count, hipMemcpyAttributes* attributes,
                               size_t* first_copies, size_t attribute_count,
                               size_t* fail_index, hipStream_t stream) {
  hipsim::Batch batch{destinations, sources,      sizes,           count,
                      {},           first_copies, attribute_count, fail_index};
  return api(
      Call::hipMemcpyBatchAsync,
      [&](Runtime& rt, const Caller& caller) {
        if (attributes != nullptr && attribute_count <= count) {
          std::for_each_n(attributes, attribute_count, [&](const auto& each) {
            batch.attributes.push_back({each.srcAccessOrder, each.flags});
          });
        }
        return rt.copy_batch(caller, batch, as_stream(stream));
      },
      [&](Runtime& rt) { rt.blame_first_copy(batch); });
}
