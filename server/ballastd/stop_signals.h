// When signals end a service without a save. The first one makes it drain and save, at once. One
// stop may send several: Slurm signals every process of a job, and the job's script signals only
// the service.
#ifndef BALLAST_SERVER_BALLASTD_STOP_SIGNALS_H_
#define BALLAST_SERVER_BALLASTD_STOP_SIGNALS_H_

#include <cstdint>

namespace ballast::server {

class StopSignals {
 public:
  // A signal within so many seconds of the last counted one is the same stop.
  static constexpr double kBurstSeconds = 1;
  // This long after the first one, a person at a terminal means a second one literally.
  static constexpr double kPersonSeconds = 10;

  enum class Meaning : uint8_t {
    kSame,  // The same stop.
    kWait,  // It counts, and the drain goes on.
    kEnd,   // The service ends now, without a save.
  };

  // At the first one. Times are of SteadySeconds. `has_terminal`: a person may be there.
  StopSignals(bool has_terminal, double now)
      : has_terminal_(has_terminal), first_(now), last_(now) {}

  // At each further one. The third counted signal ends the service; with a terminal also the
  // second.
  Meaning Another(double now) {
    if (now - last_ < kBurstSeconds) return Meaning::kSame;
    last_ = now;
    ++counted_;
    const bool person_insists = has_terminal_ && now - first_ >= kPersonSeconds;
    return counted_ >= 3 || person_insists ? Meaning::kEnd : Meaning::kWait;
  }

 private:
  const bool has_terminal_;
  const double first_;
  double last_;  // The last counted one.
  int counted_ = 1;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_STOP_SIGNALS_H_
