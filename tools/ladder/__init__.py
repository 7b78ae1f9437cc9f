"""Ladders: small runs of one family, whose losses predict those of a large run before it is paid for.

ladder.yml                  ladder_file.read_ladder   target, sizes, tokens per parameter, learning rates
  target's configuration -> family.Family             shape, batch and learning rate of each size
    schedule.scaled_schedule                          its schedule, in the steps of a small run
    first stage             tools.sweep               each of the smallest sizes with several learning rates
      LearningRateFit       fits.fit_learning_rate    the best one of each size, and of those that are not tried
    second stage            tools.sweep               the other sizes, and other amounts of tokens
      LossFit               fits.fit_loss             loss = E + A / N^a + B / D^b
        ladder.json .png target.yml   report          loss and learning rate of the target, with their uncertainty
"""
