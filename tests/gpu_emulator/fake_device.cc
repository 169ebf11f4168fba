#include "tests/gpu_emulator/fake_device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/reason.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/gpu_emulator/fake_memory.h"
#include "tests/gpu_emulator/fake_schedule.h"

namespace ballast::worker {

class FakeDevice::Impl {
 public:
  explicit Impl(FakeDeviceOptions options)
      : name_("GPU 0 (fake)"),
        options_(std::move(options)),
        memory_(name_, options_.memory_bytes),
        schedule_(options_.seed,
                  [this](bool begins) { begins ? memory_.Open() : memory_.Close(); }) {}

  const std::string& name() const { return name_; }
  const FakeDeviceOptions& options() const { return options_; }
  FakeMemory& memory() { return memory_; }
  FakeSchedule& schedule() { return schedule_; }
  std::chrono::nanoseconds Now() const {
    return options_.clock ? options_.clock() : std::chrono::steady_clock::now().time_since_epoch();
  }
  std::atomic<int>& streams() { return streams_; }

  // Before an operation: the device's error, or one that the test wants.
  absl::Status Begin(absl::string_view operation, absl::string_view what) {
    BALLAST_RETURN_IF_ERROR(Lost());
    if (!options_.fail) return absl::OkStatus();
    const absl::Status status = options_.fail(operation, what);
    if (!absl::IsUnavailable(status)) return status;
    {
      MutexLock lock(mutex_);
      if (lost_.ok()) lost_ = status;
    }
    schedule_.Lose();
    return Lost();
  }

  absl::Status Await(const FakeSchedule::Point& point) {
    return schedule_.Await(point) ? absl::OkStatus() : Lost();
  }
  // A device that is lost has ended what it was doing.
  absl::Status Synchronize(absl::string_view what, const FakeSchedule::Point& point) {
    const absl::Status begun = Begin("synchronize", what);
    if (!begun.ok() && !absl::IsUnavailable(begun)) return begun;
    const absl::Status awaited = Await(point);
    return begun.ok() ? awaited : begun;
  }

 private:
  absl::Status Lost() const {
    MutexLock lock(mutex_);
    return lost_;
  }

  const std::string name_;
  const FakeDeviceOptions options_;
  mutable Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> streams_ = 0;
  FakeMemory memory_;
  FakeSchedule schedule_;
};

namespace {

using ImplPointer = std::shared_ptr<FakeDevice::Impl>;

class FakeDeviceMemory final : public DeviceMemory {
 public:
  FakeDeviceMemory(ImplPointer impl, std::byte* data, size_t size_bytes)
      : impl_(std::move(impl)), data_(data), size_bytes_(size_bytes) {}
  ~FakeDeviceMemory() override {
    impl_->schedule().AwaitAll();
    impl_->memory().FreeDevice(data_, size_bytes_);
  }
  std::byte* data() const override { return data_; }
  size_t size_bytes() const override { return size_bytes_; }

 private:
  const ImplPointer impl_;
  std::byte* const data_;
  const size_t size_bytes_;
};

class FakeHostMemory final : public HostMemory {
 public:
  FakeHostMemory(ImplPointer impl, absl::Span<std::byte> bytes, bool owned, absl::string_view what)
      : impl_(std::move(impl)), what_(what), bytes_(bytes), owned_(owned) {
    if (pinned()) {
      impl_->memory().Pin(bytes_, what_);
    } else {
      std::fprintf(stderr, "%s: the %zu bytes for %s could not be pinned; copies will be slow\n",
                   impl_->name().c_str(), bytes_.size(), what_.c_str());
    }
  }
  ~FakeHostMemory() override {
    if (const std::string user = impl_->schedule().UserOf(bytes_); !user.empty()) {
      FakeDeviceAbort(absl::StrCat("the host memory for ", what_, " goes while stream ", user,
                                   " still has a copy from or to it"));
    }
    if (pinned()) impl_->memory().Unpin(bytes_);
    if (owned_) FakeMemory::FreeHost(bytes_.data());
  }
  absl::Span<std::byte> bytes() const override { return bytes_; }
  bool pinned() const override { return impl_->options().can_pin; }

 private:
  const ImplPointer impl_;
  const std::string what_;
  const absl::Span<std::byte> bytes_;
  const bool owned_;
};

// One Record. `at` is written by the device's thread, and read once the point is reached.
struct Recording {
  std::string stream;
  FakeSchedule::Point point;
  std::chrono::nanoseconds at = {};
};

class FakeEvent final : public DeviceEvent {
 public:
  explicit FakeEvent(ImplPointer impl) : impl_(std::move(impl)) {}

  absl::Status Synchronize() override {
    const std::shared_ptr<const Recording> last = this->last();
    return last == nullptr ? impl_->Begin("synchronize", "")
                           : impl_->Synchronize(StreamOf(last), last->point);
  }
  absl::StatusOr<bool> Done() override {
    const std::shared_ptr<const Recording> last = this->last();
    BALLAST_RETURN_IF_ERROR(impl_->Begin("query", StreamOf(last)));
    return last == nullptr || impl_->schedule().Demand(last->point);
  }
  absl::StatusOr<double> SecondsSince(const DeviceEvent& earlier) const override {
    const std::shared_ptr<const Recording> end = last();
    const std::shared_ptr<const Recording> begin = static_cast<const FakeEvent&>(earlier).last();
    BALLAST_RETURN_IF_ERROR(impl_->Begin("query", StreamOf(end)));
    for (const auto& recording : {begin, end}) {
      if (recording == nullptr || !impl_->schedule().Demand(recording->point)) {
        FakeDeviceAbort("SecondsSince of an event that is not done");
      }
    }
    const std::chrono::duration<double, std::milli> elapsed = end->at - begin->at;
    const auto milliseconds = static_cast<float>(elapsed.count());
    return std::max(0.0, milliseconds / 1000.0);
  }

  const ImplPointer& impl() const { return impl_; }
  std::shared_ptr<const Recording> last() const {
    MutexLock lock(mutex_);
    return last_;
  }
  void set_last(std::shared_ptr<const Recording> recording) {
    MutexLock lock(mutex_);
    last_ = std::move(recording);
  }

 private:
  static absl::string_view StreamOf(const std::shared_ptr<const Recording>& recording) {
    return recording == nullptr ? absl::string_view() : recording->stream;
  }

  const ImplPointer impl_;
  mutable Mutex mutex_;
  std::shared_ptr<const Recording> last_ ABSL_GUARDED_BY(mutex_);
};

class FakeStream final : public DeviceStream {
 public:
  FakeStream(ImplPointer impl, absl::string_view name)
      : impl_(std::move(impl)), name_(name), queue_(impl_->schedule().AddQueue(name_)) {
    ++impl_->streams();
  }
  ~FakeStream() override { --impl_->streams(); }
  const std::string& name() const override { return name_; }
  void* native() const override { return const_cast<FakeStream*>(this); }

  absl::Status Record(DeviceEvent& event) override {
    const OneThread one(*this);
    auto& fake = static_cast<FakeEvent&>(event);
    CheckOurs(fake);
    BALLAST_RETURN_IF_ERROR(impl_->Begin("record", name_));
    auto recording = std::make_shared<Recording>();
    recording->stream = name_;
    recording->point = impl_->schedule().Give(
        queue_, [recording, impl = impl_.get()] { recording->at = impl->Now(); });
    fake.set_last(std::move(recording));
    return absl::OkStatus();
  }
  absl::Status Wait(const DeviceEvent& event) override {
    const OneThread one(*this);
    const auto& fake = static_cast<const FakeEvent&>(event);
    CheckOurs(fake);
    BALLAST_RETURN_IF_ERROR(impl_->Begin("wait", name_));
    const std::shared_ptr<const Recording> last = fake.last();
    if (last != nullptr) impl_->schedule().GiveWait(queue_, last->point);
    return absl::OkStatus();
  }

  absl::Status CopyToHost(absl::Span<std::byte> to, const void* from) override {
    impl_->memory().CheckOnDevice(from, to.size(), "copy to host");
    return CopyWithHost("copy to host", to, to.data(), from);
  }
  absl::Status CopyToDevice(void* to, absl::Span<const std::byte> from) override {
    impl_->memory().CheckOnDevice(to, from.size(), "copy to device");
    return CopyWithHost("copy to device", from, to, from.data());
  }
  absl::Status CopyOnDevice(void* to, const void* from, size_t size_bytes) override {
    impl_->memory().CheckOnDevice(to, size_bytes, "copy on device");
    impl_->memory().CheckOnDevice(from, size_bytes, "copy on device");
    return Give("copy on device", name_, [=] {
      if (size_bytes > 0) std::memcpy(to, from, size_bytes);
    });
  }
  absl::Status Zero(void* to, size_t size_bytes) override {
    impl_->memory().CheckOnDevice(to, size_bytes, "zero");
    return Give("zero", name_, [=] {
      if (size_bytes > 0) std::memset(to, 0, size_bytes);
    });
  }
  absl::Status Synchronize() override {
    const OneThread one(*this);
    return impl_->Synchronize(name_, impl_->schedule().End(queue_));
  }

  absl::Status Give(absl::string_view operation, absl::string_view what,
                    std::function<void()> work) {
    const OneThread one(*this);
    BALLAST_RETURN_IF_ERROR(impl_->Begin(operation, what));
    impl_->schedule().Give(queue_, std::move(work));
    return absl::OkStatus();
  }

 private:
  // Notices two threads in calls of one stream.
  class OneThread {
   public:
    explicit OneThread(FakeStream& stream) : stream_(stream) {
      if (!stream_.in_use_.exchange(true)) return;
      FakeDeviceAbort(absl::StrCat("stream ", stream_.name_, " is used by two threads at once"));
    }
    ~OneThread() { stream_.in_use_ = false; }

   private:
    FakeStream& stream_;
  };

  void CheckOurs(const FakeEvent& event) const {
    if (event.impl() != impl_) FakeDeviceAbort("a stream and an event are of two devices");
  }

  absl::Status CopyWithHost(absl::string_view operation, absl::Span<const std::byte> host, void* to,
                            const void* from) {
    const OneThread one(*this);
    impl_->memory().CheckOnHost(host, operation);
    BALLAST_RETURN_IF_ERROR(impl_->Begin(operation, name_));
    if (host.empty()) return absl::OkStatus();
    const bool pinned = impl_->memory().IsPinned(host);
    const FakeSchedule::Point point = impl_->schedule().Give(
        queue_, [to, from, size_bytes = host.size()] { std::memcpy(to, from, size_bytes); }, host);
    return pinned ? absl::OkStatus() : impl_->Await(point);
  }

  const ImplPointer impl_;
  const std::string name_;
  const std::shared_ptr<FakeSchedule::Queue> queue_;
  std::atomic<bool> in_use_ = false;
};

}  // namespace

FakeDevice::FakeDevice(FakeDeviceOptions options)
    : impl_(std::make_shared<Impl>(std::move(options))) {}

FakeDevice::~FakeDevice() {
  impl_->memory().CheckNothingIsLeft();
  if (impl_->streams() != 0) {
    FakeDeviceAbort(absl::StrCat(impl_->streams().load(), " streams are left"));
  }
}

const std::string& FakeDevice::name() const { return impl_->name(); }
int64_t FakeDevice::memory_bytes() const { return impl_->options().memory_bytes; }
int64_t FakeDevice::allocated_bytes() const { return impl_->memory().allocated_bytes(); }
int64_t FakeDevice::most_allocated_bytes() const { return impl_->memory().most_allocated_bytes(); }

absl::StatusOr<std::unique_ptr<DeviceMemory>> FakeDevice::Allocate(size_t size_bytes,
                                                                   absl::string_view what) {
  BALLAST_RETURN_IF_ERROR(impl_->Begin("allocate", what));
  std::byte* data = impl_->memory().AllocateDevice(size_bytes);
  if (data == nullptr) {
    return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                          name(), ": no memory for ", what, ": ", size_bytes, " bytes, of ",
                          memory_bytes(), " are ", impl_->memory().free_bytes(), " free")),
                      reason::kDeviceMemoryFull);
  }
  return std::make_unique<FakeDeviceMemory>(impl_, data, size_bytes);
}

absl::StatusOr<std::unique_ptr<HostMemory>> FakeDevice::AllocateHost(size_t size_bytes,
                                                                     absl::string_view what) {
  BALLAST_RETURN_IF_ERROR(impl_->Begin("allocate host", what));
  std::byte* data = FakeMemory::AllocateHost(size_bytes);
  if (data == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the host has no memory for ", what, ": ", size_bytes, " bytes"));
  }
  return std::make_unique<FakeHostMemory>(impl_, absl::MakeSpan(data, size_bytes), true, what);
}

absl::StatusOr<std::unique_ptr<HostMemory>> FakeDevice::PinHost(absl::Span<std::byte> bytes,
                                                                absl::string_view what) {
  BALLAST_RETURN_IF_ERROR(impl_->Begin("pin", what));
  return std::make_unique<FakeHostMemory>(impl_, bytes, false, what);
}

absl::StatusOr<std::unique_ptr<DeviceStream>> FakeDevice::CreateStream(absl::string_view name) {
  BALLAST_RETURN_IF_ERROR(impl_->Begin("create stream", name));
  return std::make_unique<FakeStream>(impl_, name);
}

absl::StatusOr<std::unique_ptr<DeviceEvent>> FakeDevice::CreateEvent() {
  BALLAST_RETURN_IF_ERROR(impl_->Begin("create event", ""));
  return std::make_unique<FakeEvent>(impl_);
}

absl::Status GiveToFakeStream(DeviceStream& stream, absl::string_view name,
                              std::function<void()> work) {
  return static_cast<FakeStream&>(stream).Give("kernel", name, std::move(work));
}

}  // namespace ballast::worker
