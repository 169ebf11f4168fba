#include "gpu_worker/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/log.h"
#include "gpu_worker/cuda/gpu_failure.h"
#include "gpu_worker/cuda/gpu_stream.h"

namespace ballast::worker {
namespace {

constexpr int kLeastCapability = 80;  // The least of CMAKE_CUDA_ARCHITECTURES: bf16 tensor cores.
constexpr char kComputeStream[] = "compute";

std::string Size(double bytes) { return absl::StrFormat("%.2f GiB", bytes / (1 << 30)); }

// What everything made by a device shares with it.
struct Shared {
  Shared(int ordinal, std::string gpu) : failure(ordinal, std::move(gpu)) {}
  GpuFailure failure;
  std::atomic<int64_t> allocated_bytes = 0;
};

class CudaMemory final : public DeviceMemory {
 public:
  CudaMemory(std::shared_ptr<Shared> shared, void* data, size_t size_bytes)
      : shared_(std::move(shared)), data_(data), size_bytes_(size_bytes) {
    shared_->allocated_bytes += static_cast<int64_t>(size_bytes_);
  }
  // Of a lost GPU nothing can be freed: every call fails, and the process must end. The same holds
  // in the other destructors of this file.
  ~CudaMemory() override {
    shared_->allocated_bytes -= static_cast<int64_t>(size_bytes_);
    if (shared_->failure.Enter().ok()) (void)cudaFree(data_);
  }
  std::byte* data() const override { return static_cast<std::byte*>(data_); }
  size_t size_bytes() const override { return size_bytes_; }

 private:
  const std::shared_ptr<Shared> shared_;
  void* const data_;
  const size_t size_bytes_;
};

struct FreeAligned {
  void operator()(std::byte* memory) const {
    ::operator delete(memory, std::align_val_t(kPageBytes));
  }
};
using OwnedBytes = std::unique_ptr<std::byte, FreeAligned>;

class CudaHostMemory final : public HostMemory {
 public:
  CudaHostMemory(std::shared_ptr<Shared> shared, OwnedBytes owned, absl::Span<std::byte> bytes,
                 bool pinned)
      : shared_(std::move(shared)), owned_(std::move(owned)), bytes_(bytes), pinned_(pinned) {}
  ~CudaHostMemory() override {
    // Before the memory is freed: `owned_` is destroyed after this body.
    if (pinned_ && shared_->failure.Enter().ok()) (void)cudaHostUnregister(bytes_.data());
  }
  absl::Span<std::byte> bytes() const override { return bytes_; }
  bool pinned() const override { return pinned_; }

 private:
  const std::shared_ptr<Shared> shared_;
  const OwnedBytes owned_;  // Null: not owned.
  const absl::Span<std::byte> bytes_;
  const bool pinned_;
};

class CudaEvent final : public DeviceEvent {
 public:
  CudaEvent(std::shared_ptr<Shared> shared, cudaEvent_t event)
      : shared_(std::move(shared)), event_(event) {}
  ~CudaEvent() override {
    if (shared_->failure.Enter().ok()) (void)cudaEventDestroy(event_);
  }
  absl::Status Synchronize() override {
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    return shared_->failure.Check(cudaEventSynchronize(event_), "waiting for an event");
  }
  absl::StatusOr<bool> Done() override {
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) {
      // This is an answer and no failure. A later call must not be blamed for it.
      (void)cudaGetLastError();
      return false;
    }
    BALLAST_RETURN_IF_ERROR(shared_->failure.Check(error, "asking for an event"));
    return true;
  }
  absl::StatusOr<double> SecondsSince(const DeviceEvent& earlier) const override {
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    float milliseconds = 0;
    BALLAST_RETURN_IF_ERROR(shared_->failure.Check(
        cudaEventElapsedTime(&milliseconds, static_cast<const CudaEvent&>(earlier).event_, event_),
        "reading the time of an event"));
    return milliseconds / 1000.0;
  }
  cudaEvent_t native() const { return event_; }

 private:
  const std::shared_ptr<Shared> shared_;
  const cudaEvent_t event_;
};

class CudaStream final : public GpuStream {
 public:
  CudaStream(std::shared_ptr<Shared> shared, cudaStream_t stream, absl::string_view name)
      : shared_(std::move(shared)), stream_(stream), name_(name) {}
  ~CudaStream() override {
    if (shared_->failure.Enter().ok()) (void)cudaStreamDestroy(stream_);
  }
  const std::string& name() const override { return name_; }

  absl::Status Record(DeviceEvent& event) override {
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    return Check(cudaEventRecord(static_cast<CudaEvent&>(event).native(), stream_), "record");
  }
  absl::Status Wait(const DeviceEvent& event) override {
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    return Check(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(event).native()),
                 "wait");
  }
  absl::Status CopyToHost(absl::Span<std::byte> to, const void* from) override {
    return Copy(to.data(), from, to.size(), cudaMemcpyDeviceToHost, "copy to host");
  }
  absl::Status CopyToDevice(void* to, absl::Span<const std::byte> from) override {
    return Copy(to, from.data(), from.size(), cudaMemcpyHostToDevice, "copy to device");
  }
  absl::Status CopyOnDevice(void* to, const void* from, size_t size_bytes) override {
    return Copy(to, from, size_bytes, cudaMemcpyDeviceToDevice, "copy on device");
  }
  absl::Status Zero(void* to, size_t size_bytes) override {
    if (size_bytes == 0) return absl::OkStatus();
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    return Check(cudaMemsetAsync(to, 0, size_bytes, stream_), "zero");
  }
  absl::Status Synchronize() override {
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    return Check(cudaStreamSynchronize(stream_), "synchronize");
  }
  void* native() const override { return stream_; }

  absl::StatusOr<cudaStream_t> Enter() override {
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    return stream_;
  }
  absl::Status Check(cudaError_t error, absl::string_view what) override {
    if (error == cudaSuccess) return absl::OkStatus();
    return shared_->failure.Check(error, absl::StrCat("stream ", name_, ": ", what));
  }
  absl::Status CheckGpu(absl::string_view what) override {
    // The query does not wait, and also returns what earlier work on the GPU has failed with.
    const cudaError_t error = cudaStreamQuery(stream_);
    if (error != cudaErrorNotReady) return Check(error, what);
    (void)cudaGetLastError();
    return absl::OkStatus();
  }

 private:
  absl::Status Copy(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                    absl::string_view what) {
    if (size_bytes == 0) return absl::OkStatus();
    BALLAST_RETURN_IF_ERROR(shared_->failure.Enter());
    return Check(cudaMemcpyAsync(to, from, size_bytes, kind, stream_), what);
  }

  const std::shared_ptr<Shared> shared_;
  const cudaStream_t stream_;
  const std::string name_;
};

class OpenedDevice final : public CudaDevice {
 public:
  OpenedDevice(const cudaDeviceProp& properties, std::shared_ptr<Shared> shared,
               std::unique_ptr<CudaStream> zeroing)
      : properties_(properties), shared_(std::move(shared)), zeroing_(std::move(zeroing)) {}

  const std::string& name() const override { return shared_->failure.gpu(); }
  int compute_capability() const override { return properties_.major * 10 + properties_.minor; }
  int64_t memory_bytes() const override { return static_cast<int64_t>(properties_.totalGlobalMem); }
  int64_t allocated_bytes() const override { return shared_->allocated_bytes; }
  absl::Status MakeCurrent() override { return failure().Enter(); }
  std::array<std::byte, 16> uuid() const override {
    std::array<std::byte, 16> uuid;
    static_assert(sizeof(uuid) == sizeof(properties_.uuid));
    std::memcpy(uuid.data(), &properties_.uuid, sizeof(uuid));
    return uuid;
  }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> Allocate(size_t size_bytes,
                                                         absl::string_view what) override {
    BALLAST_RETURN_IF_ERROR(failure().Enter());
    void* data = nullptr;
    // A param group may be empty; its space has an address all the same.
    const cudaError_t error = cudaMalloc(&data, std::max<size_t>(size_bytes, 1));
    // Not left to GpuFailure, which knows neither sizes nor what they are for.
    if (error == cudaErrorMemoryAllocation) return OutOfMemory(size_bytes, what);
    BALLAST_RETURN_IF_ERROR(failure().Check(error, absl::StrCat("allocating ", what)));
    auto memory = std::make_unique<CudaMemory>(shared_, data, size_bytes);
    // The zeros are there before any other stream can look.
    BALLAST_RETURN_IF_ERROR(zeroing_->Zero(data, size_bytes));
    BALLAST_RETURN_IF_ERROR(zeroing_->Synchronize());
    return memory;
  }

  absl::StatusOr<std::unique_ptr<HostMemory>> AllocateHost(size_t size_bytes,
                                                           absl::string_view what) override {
    // Ordinary memory that is pinned afterwards, not cudaHostAlloc: where pinning fails, the same
    // memory is used unpinned.
    OwnedBytes owned(static_cast<std::byte*>(::operator new(
        std::max<size_t>(size_bytes, 1), std::align_val_t(kPageBytes), std::nothrow)));
    if (owned == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("this host has no ", Size(static_cast<double>(size_bytes)), " for ", what));
    }
    const absl::Span<std::byte> bytes(owned.get(), size_bytes);
    BALLAST_ASSIGN_OR_RETURN(const bool pinned, Pin(bytes, what));
    return std::make_unique<CudaHostMemory>(shared_, std::move(owned), bytes, pinned);
  }
  absl::StatusOr<std::unique_ptr<HostMemory>> PinHost(absl::Span<std::byte> bytes,
                                                      absl::string_view what) override {
    BALLAST_ASSIGN_OR_RETURN(const bool pinned, Pin(bytes, what));
    return std::make_unique<CudaHostMemory>(shared_, nullptr, bytes, pinned);
  }

  absl::StatusOr<std::unique_ptr<DeviceStream>> CreateStream(absl::string_view name) override {
    BALLAST_RETURN_IF_ERROR(failure().Enter());
    int least = 0;
    int greatest = 0;
    BALLAST_RETURN_IF_ERROR(failure().Check(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                            "asking for streams' priorities"));
    // cudaStreamNonBlocking: no order with CUDA's default stream, so that only events order
    // streams.
    cudaStream_t stream = nullptr;
    BALLAST_RETURN_IF_ERROR(
        failure().Check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                     name == kComputeStream ? least : greatest),
                        absl::StrCat("creating stream ", name)));
    return std::make_unique<CudaStream>(shared_, stream, name);
  }
  absl::StatusOr<std::unique_ptr<DeviceEvent>> CreateEvent() override {
    BALLAST_RETURN_IF_ERROR(failure().Enter());
    // Timing stays on, because SecondsSince reads it.
    cudaEvent_t event = nullptr;
    // Waiting must not cost a core: the service may be on this host.
    BALLAST_RETURN_IF_ERROR(failure().Check(cudaEventCreateWithFlags(&event, cudaEventBlockingSync),
                                            "creating an event"));
    return std::make_unique<CudaEvent>(shared_, event);
  }

 private:
  GpuFailure& failure() { return shared_->failure; }

  absl::Status OutOfMemory(size_t size_bytes, absl::string_view what) {
    (void)cudaGetLastError();
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    (void)cudaMemGetInfo(&free_bytes, &total_bytes);
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            name(), ": no ", Size(static_cast<double>(size_bytes)), " for ", what, "; ",
            Size(static_cast<double>(free_bytes)), " of ", Size(static_cast<double>(total_bytes)),
            " are free, this worker has ", Size(static_cast<double>(allocated_bytes())))),
        reason::kDeviceMemoryFull);
  }

  // False, and a warning, where the host does not allow it.
  absl::StatusOr<bool> Pin(absl::Span<std::byte> bytes, absl::string_view what) {
    if (bytes.empty()) return false;
    BALLAST_RETURN_IF_ERROR(failure().Enter());
    const cudaError_t error =
        cudaHostRegister(bytes.data(), bytes.size(), cudaHostRegisterPortable);
    if (error == cudaSuccess) return true;
    (void)cudaGetLastError();
    Log().warn(
        "{}: {} of host memory for {} cannot be pinned ({}), copies will be slow; see "
        "ulimit -l",
        name(), Size(static_cast<double>(bytes.size())), std::string(what),
        cudaGetErrorString(error));
    return false;
  }

  const cudaDeviceProp properties_;
  const std::shared_ptr<Shared> shared_;
  const std::unique_ptr<CudaStream> zeroing_;
};

std::string VersionName(int version) {
  // CUDA writes 12.4 as 12040.
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

absl::Status NoDriver() {
  int driver = 0;
  // It sets 0 where no driver is installed.
  (void)cudaDriverGetVersion(&driver);
  if (driver == 0) {
    return absl::FailedPreconditionError(
        "there is no NVIDIA driver on this host; install one, or use --device=cpu");
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the NVIDIA driver is for CUDA ", VersionName(driver), ", this program needs ",
                   VersionName(CUDART_VERSION),
                   "; update the driver, or put the folder of NVIDIA's cuda-compat package into "
                   "LD_LIBRARY_PATH, or use --device=cpu"));
}

}  // namespace

absl::StatusOr<int> CudaDevice::Count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  // CUDA returns this also where there is no driver at all; NoDriver distinguishes the two.
  if (error == cudaErrorInsufficientDriver) return NoDriver();
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    return absl::FailedPreconditionError(
        "there is no GPU that this process may use; see nvidia-smi and CUDA_VISIBLE_DEVICES, or "
        "use --device=cpu");
  }
  if (error != cudaSuccess) {
    return absl::UnavailableError(absl::StrCat("no GPU can be used: ", cudaGetErrorString(error),
                                               " (", cudaGetErrorName(error),
                                               "); see nvidia-smi and dmesg"));
  }
  return count;
}

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Open(int local_rank) {
  BALLAST_ASSIGN_OR_RETURN(const int count, Count());
  const int ordinal = local_rank % count;
  // The GPU's name is not known yet, so the first errors have its number alone.
  GpuFailure opening(ordinal, absl::StrCat("GPU ", ordinal));
  cudaDeviceProp properties = {};
  BALLAST_RETURN_IF_ERROR(
      opening.Check(cudaGetDeviceProperties(&properties, ordinal), "asking what it is"));
  auto shared =
      std::make_shared<Shared>(ordinal, absl::StrCat("GPU ", ordinal, " (", properties.name, ")"));
  if (properties.major * 10 + properties.minor < kLeastCapability) {
    return absl::FailedPreconditionError(
        absl::StrCat(shared->failure.gpu(), " has compute capability ", properties.major, ".",
                     properties.minor, ", the kernels need 8.0; use a newer one, or --device=cpu"));
  }
  // Waiting for a stream must not cost a core, as for an event.
  BALLAST_RETURN_IF_ERROR(shared->failure.Check(
      cudaInitDevice(ordinal, cudaDeviceScheduleBlockingSync, cudaInitDeviceFlagsAreValid),
      "its first use"));
  BALLAST_RETURN_IF_ERROR(shared->failure.Enter());
  // A stream of its own, so that Allocate waits for its zeros and for no other work.
  cudaStream_t zeroing = nullptr;
  BALLAST_RETURN_IF_ERROR(shared->failure.Check(
      cudaStreamCreateWithFlags(&zeroing, cudaStreamNonBlocking), "creating a stream"));
  auto stream = std::make_unique<CudaStream>(shared, zeroing, "zeroing");
  return std::make_unique<OpenedDevice>(properties, std::move(shared), std::move(stream));
}

}  // namespace ballast::worker
