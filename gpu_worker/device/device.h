// A GPU for the worker: memory, streams, events, copies. cuda/cuda_device.h is the real one. The
// tests' device (tests/gpu_emulator/fake_device.h) runs on the CPU, as late and as out of order as
// streams and events allow, and fails where a test requests it.
//
//   std::unique_ptr<DeviceStream> compute = device.CreateStream("compute").value();
//   std::unique_ptr<DeviceEvent> ready = device.CreateEvent().value();
//   ... work given to compute ...
//   compute->Record(*ready);
//   copies->Wait(*ready);                      // later work of copies comes after
//   copies->CopyToHost(bytes, from);
//
// A stream works in order; two streams in any order that events permit. Only calls named
// Synchronize wait for the device. Memory that a stream has to read or write, host memory too,
// belongs to it until a later event is done.
//
// Errors: messages name the GPU and the stream.
//   RESOURCE_EXHAUSTED   no memory, with the sizes and the purpose
//   UNAVAILABLE          the GPU is lost or has failed in earlier work; the first call that notices
//                        and all later ones return it; only a new process helps
//   FAILED_PRECONDITION  the binary has no code for this GPU
//   INTERNAL             the driver refuses a call, and the GPU goes on
//
// Threads: Device is thread-safe. One thread at a time uses a stream or records an event; any
// thread may wait for an event.
#ifndef BALLAST_GPU_WORKER_DEVICE_DEVICE_H_
#define BALLAST_GPU_WORKER_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace ballast::worker {

// Memory of the device; the host never reads or writes it. 256-byte aligned. Freed by its
// destructor, which may wait for the device.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::byte* data() const = 0;
  virtual size_t size_bytes() const = 0;

  // The memory as elements of T.
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
};

// Of the host.
inline constexpr size_t kPageBytes = 4096;

// Memory of the host, for copies from and to the device, from the beginning of a page.
class HostMemory {
 public:
  virtual ~HostMemory() = default;
  virtual absl::Span<std::byte> bytes() const = 0;
  // False: ordinary memory, because pinning failed. Copies are correct but slower: they use the
  // driver's memory, and the calling thread waits for them.
  virtual bool pinned() const = 0;
};

class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Waits until the work before the last Record is done. Returns at once if never recorded.
  virtual absl::Status Synchronize() = 0;
  virtual absl::StatusOr<bool> Done() = 0;
  // Both done, `earlier` first. Seconds between them by the device's clock. The driver uses single
  // precision, so over some seconds they are exact to microseconds.
  virtual absl::StatusOr<double> SecondsSince(const DeviceEvent& earlier) const = 0;
};

class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual const std::string& name() const = 0;

  virtual absl::Status Record(DeviceEvent& event) = 0;
  // For the last Record of `event` before this call; an event without a Record delays nothing.
  virtual absl::Status Wait(const DeviceEvent& event) = 0;

  virtual absl::Status CopyToHost(absl::Span<std::byte> to, const void* from) = 0;
  virtual absl::Status CopyToDevice(void* to, absl::Span<const std::byte> from) = 0;
  virtual absl::Status CopyOnDevice(void* to, const void* from, size_t size_bytes) = 0;
  virtual absl::Status Zero(void* to, size_t size_bytes) = 0;

  // Waits until all its work is done.
  virtual absl::Status Synchronize() = 0;

  // For kernels and libraries: a cudaStream_t, or its counterpart in the tests' device.
  virtual void* native() const = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;  // As in "GPU 0 (NVIDIA H200)".
  // As the driver counts, for example 80 or 90.
  virtual int compute_capability() const = 0;
  virtual int64_t memory_bytes() const = 0;
  virtual int64_t allocated_bytes() const = 0;  // Currently, by Allocate.

  // Zeros. `what` names it in errors: "activations". RESOURCE_EXHAUSTED (DEVICE_MEMORY_FULL).
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(size_t size_bytes,
                                                                 absl::string_view what) = 0;
  // Pinned if possible; otherwise a warning goes to the log.
  virtual absl::StatusOr<std::unique_ptr<HostMemory>> AllocateHost(size_t size_bytes,
                                                                   absl::string_view what) = 0;
  // Pins memory of the caller until the result is destroyed, which must precede the end of the
  // memory. Its bytes() are `bytes`. If pinning fails, as AllocateHost.
  virtual absl::StatusOr<std::unique_ptr<HostMemory>> PinHost(absl::Span<std::byte> bytes,
                                                              absl::string_view what) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream(absl::string_view name) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_DEVICE_H_
