// A GPU as the worker uses it: memory, streams, events, copies. cuda/cuda_device.h is the real one;
// the tests' own (tests/gpu_emulator/fake_device.h) runs everything on the CPU, as late and in as
// odd an order as streams and events allow, and fails where a test asks for it.
//
//   std::unique_ptr<DeviceStream> compute = device.CreateStream("compute").value();
//   std::unique_ptr<DeviceEvent> ready = device.CreateEvent().value();
//   ... work given to compute ...
//   compute->Record(*ready);
//   copies->Wait(*ready);                      // what copies is given from now on comes after
//   copies->CopyToHost(bytes, from);
//
// A stream does what it is given in order; two streams in any order that events leave open. Nothing
// waits for the device except the calls named Synchronize. Memory that a stream was given to read
// or write belongs to it until an event after that is done, host memory too.
//
// Errors: RESOURCE_EXHAUSTED, memory that cannot be had, with the sizes and what it was for;
// UNAVAILABLE, the GPU is lost or has failed in work given before: the call that notices it first
// returns it, and so do all later ones; only a new process mends it; FAILED_PRECONDITION, the
// binary has nothing for this GPU; INTERNAL, the driver refuses a call, and the GPU goes on.
// Messages name the GPU and the stream.
//
// Threads: Device is thread-safe. A stream is used by one thread at a time, an event recorded by
// one; any thread may wait for it.
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
  // False: ordinary memory, because none could be pinned. Copies are right, and slower: they pass
  // through memory of the driver's, and the calling thread waits for them.
  virtual bool pinned() const = 0;
};

class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Waits until the work before the last Record is done; one never recorded is.
  virtual absl::Status Synchronize() = 0;
  virtual absl::StatusOr<bool> Done() = 0;
  // Both done, `earlier` first. Seconds of the device's clock from there to this one, as the driver
  // has them: in single precision, so to within microseconds of some seconds only.
  virtual absl::StatusOr<double> SecondsSince(const DeviceEvent& earlier) const = 0;
};

class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual const std::string& name() const = 0;

  virtual absl::Status Record(DeviceEvent& event) = 0;
  // For the last Record of `event` before this call; an event that was never recorded delays
  // nothing.
  virtual absl::Status Wait(const DeviceEvent& event) = 0;

  virtual absl::Status CopyToHost(absl::Span<std::byte> to, const void* from) = 0;
  virtual absl::Status CopyToDevice(void* to, absl::Span<const std::byte> from) = 0;
  virtual absl::Status CopyOnDevice(void* to, const void* from, size_t size_bytes) = 0;
  virtual absl::Status Zero(void* to, size_t size_bytes) = 0;

  // Waits until everything that it was given is done.
  virtual absl::Status Synchronize() = 0;

  // For kernels and libraries: a cudaStream_t, or what the tests' device has in its place.
  virtual void* native() const = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;  // As in "GPU 0 (NVIDIA H200)".
  // As the driver counts, for example 80 or 90.
  virtual int compute_capability() const = 0;
  virtual int64_t memory_bytes() const = 0;
  virtual int64_t allocated_bytes() const = 0;  // Now, by Allocate.

  // Zeros. `what` names it in errors: "activations".
  virtual absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(size_t size_bytes,
                                                                 absl::string_view what) = 0;
  // Pinned if that can be had, and if not a warning in the log.
  virtual absl::StatusOr<std::unique_ptr<HostMemory>> AllocateHost(size_t size_bytes,
                                                                   absl::string_view what) = 0;
  // Pins memory that the caller owns until the result is destroyed, which must precede the end of
  // the memory. Its bytes() are `bytes`; as AllocateHost where pinning fails.
  virtual absl::StatusOr<std::unique_ptr<HostMemory>> PinHost(absl::Span<std::byte> bytes,
                                                              absl::string_view what) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream(absl::string_view name) = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() = 0;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_DEVICE_DEVICE_H_
