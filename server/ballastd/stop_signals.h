// When signals end a service without a save. The first one makes it drain and save, at once. One
// stop may come several times: Slurm signals every process of a job, the job's script the service
// alone.
#ifndef BALLAST_SERVER_BALLASTD_STOP_SIGNALS_H_
#define BALLAST_SERVER_BALLASTD_STOP_SIGNALS_H_

#include <cstdint>

namespace ballast::server {

class StopSignals {
 public:
  // Within so many seconds of the last one that counted, a signal is that one again.
  static constexpr double kBurstSeconds = 1;
  // So long after the first one, a person at a terminal means the second one as it is.
  static constexpr double kPersonSeconds = 10;

  enum class Meaning : uint8_t {
    kSame,  // No other one.
    kWait,  // It counts, and the drain goes on.
    kEnd,   // The service ends now, unsaved.
  };

  // At the first one. Times are of SteadySeconds. `has_terminal`: a person may be there.
  StopSignals(bool has_terminal, double now)
      : has_terminal_(has_terminal), first_(now), last_(now) {}

  // At each further one. The third that counts ends the service, with a terminal also the second.
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
  double last_;  // That counted.
  int counted_ = 1;
};

}  // namespace ballast::server

#endif  // BALLAST_SERVER_BALLASTD_STOP_SIGNALS_H_
